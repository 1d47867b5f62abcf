"""Counter-based noise: the same bits in NumPy and C++, for any number of threads.

The generator is Philox 4x32 with seven rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011): the fewest rounds that pass all of its authors' tests; their ten include a safety margin.
Nothing is drawn in sequence: element ``i`` of tensor ``t`` at step ``s`` on rank ``r`` has its own
32-bit word, so that any thread or device can compute this word independently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvd_compress.codecs.checks import TILE

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class NoiseKey:
    """A tensor's position in the noise.

    Attributes:
        seed: the seed, the same on every rank; 0 <= seed < 2**32.
        rank: the rank within its process set, as ranks draw independent noise; 0 <= rank < 2**32.
        tensor: an integer id of the tensor, the same on every rank; 0 <= tensor < 2**32.
        step: the number of times that the tensor has been encoded before; 0 <= step < 2**64.
    """

    seed: int = 0
    rank: int = 0
    tensor: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        for field, bits in (("seed", 32), ("rank", 32), ("tensor", 32), ("step", 64)):
            value = getattr(self, field)
            if not 0 <= value < 1 << bits:
                raise ValueError(
                    f"NoiseKey.{field}: expected an integer in [0, 2**{bits}), got {value!r}"
                )


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Computes one Philox 4x32-7 block per counter.

    Args:
        counter: the counters, shape=(4, n), dtype uint32.
        key: two 32-bit integers.

    Returns:
        shape=(4, n), dtype uint32.
    """
    x0, x1, x2, x3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = x0 * _MULTIPLIERS[0]
        p1 = x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (p1 >> _HALF) ^ x1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _HALF) ^ x3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3]).astype(np.uint32)


def uniform(count: int, key: NoiseKey) -> np.ndarray:
    """The uniform random numbers for elements ``0 .. count - 1`` of one tensor.

    Element ``i`` takes word ``(i mod 64) // 16`` of the block whose first counter word is
    ``16 * (i // 64) + i mod 16``; the other counter words are the tensor's id and the low and high
    half of the step; the key is (seed, rank). The top 24 bits are kept.

    Returns:
        Integers in [0, 2**24), exact in float32, to be compared with ``probability * 2**24``;
        shape=(count,), dtype float32.
    """
    by_element = _words(-(-count // TILE), key).reshape(-1)[:count]
    return (by_element >> np.uint32(8)).astype(np.float32)


def rounding(count: int, key: NoiseKey) -> np.ndarray:
    """The uniform random numbers that round residuals, for elements ``0 .. count - 1`` of one tensor.

    They are independent of the numbers of :func:`uniform`, as they belong to a step 2**63 away. With
    ``i mod 1024 = 128 r + 32 w + 16 h + l``, element ``i`` takes the lower half (``h = 0``) or the upper
    half (``h = 1``) of word ``w`` of the block whose first counter word is ``16 * (i // 1024) + l``, with
    its upper three bits flipped as those of ``r`` are set. So eight rows of 128 elements share their
    numbers: each is uniform, and the eight lie in eight different eighths of the range.

    Returns:
        Integers in [0, 2**16), shape=(count,), dtype uint32.
    """
    words = _words(-(-count // 1024), replace(key, step=key.step ^ 1 << 63))
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2)
    rows = np.arange(8, dtype=np.uint32)[:, None] << np.uint32(13)
    return (halves.reshape(-1, 1, 128) ^ rows).reshape(-1)[:count]


def _words(tiles: int, key: NoiseKey) -> np.ndarray:
    """The words of sixteen counters for each tile, shape=(tiles, 4, 16), dtype uint32."""
    first = np.arange(tiles * 16, dtype=np.uint32)
    counter = np.empty((4, first.size), np.uint32)
    counter[0] = first
    counter[1] = key.tensor
    counter[2] = key.step & 0xFFFFFFFF
    counter[3] = key.step >> 32
    words = philox(counter, (key.seed, key.rank))
    return words.reshape(4, tiles, 16).transpose(1, 0, 2)
