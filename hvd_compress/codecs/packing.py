"""Packing of small integers: bit planes, trits, and lanes of words that can be added.

All three put neighbouring elements in neighbouring lanes, so that a vector unit or a warp packs and
unpacks them without shuffling (``docs/format.md``, "Packed codes").
"""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs.checks import TILE


def plane_bytes(count: int, bits: int) -> int:
    """The bytes that ``count`` codes of ``bits`` bits take as bit planes, with the last tile padded."""
    return -(-count // TILE) * 8 * bits


def pack_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes into bit planes.

    Args:
        codes: the codes, each below ``2**bits``; shape=(n,), dtype uint8.
        bits: the number of bits in a code, 1 to 8.

    Returns:
        shape=(plane_bytes(n, bits),), dtype uint8. Tile ``t`` holds elements ``64 t .. 64 t + 63`` as
        ``bits`` words of 8 bytes, the least significant plane first; within a word, element ``e`` of
        the tile is bit ``e``. Bits past the last element are 0.
    """
    tiles = -(-codes.size // TILE)
    padded = np.zeros(tiles * TILE, np.uint8)
    padded[: codes.size] = codes
    planes = padded.reshape(tiles, 1, TILE) >> np.arange(bits, dtype=np.uint8)[:, None] & 1
    return np.packbits(planes, axis=-1, bitorder="little").reshape(-1)


def unpack_planes(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_planes`: shape=(count,), dtype uint8."""
    planes = np.unpackbits(packed.reshape(-1, bits, 8), axis=-1, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)[:, None]
    return (planes * weights).sum(axis=1, dtype=np.uint8).reshape(-1)[:count]


def trit_bytes(count: int) -> int:
    """The bytes that ``count`` trits take: five trits per byte, rounded up to a multiple of 4 bytes."""
    return -(-count // 20) * 4


def pack_trits(digits: np.ndarray) -> np.ndarray:
    """Packs base-3 digits, shape=(n,), uint8, five to a byte.

    The result has ``m = trit_bytes(n)`` bytes, uint8. Byte ``j`` is the sum over ``k = 0 .. 4`` of ``3**k``
    times digit ``k * m + j``; digits past the end are 0.
    """
    size = trit_bytes(digits.size)
    padded = np.zeros(5 * size, np.uint8)
    padded[: digits.size] = digits
    weights = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    return (padded.reshape(5, size) * weights).sum(axis=0, dtype=np.uint8)


def unpack_trits(packed: np.ndarray, count: int) -> np.ndarray:
    """The inverse of :func:`pack_trits`: shape=(count,), dtype uint8, each below 3.

    No encoder writes bytes above 242; their top digit, which would be 3, is read as 0.
    """
    weights = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    digits = packed[None, :] // weights % 3
    return digits.astype(np.uint8).reshape(-1)[:count]


WORD_BITS = 32
"""The bits of a word, which holds several lanes: Horovod's allreduce can add int32."""


def lane_bits(largest: int) -> int:
    """The bits of the narrowest lane that holds every integer in ``[-largest, largest]``."""
    return (2 * largest).bit_length()


def lane_words(count: int, bits: int) -> int:
    """The number of words that ``count`` lanes of ``bits`` bits take."""
    lanes = WORD_BITS // bits
    return -(-count // lanes)


def pack_lanes(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs integers into words that can be added as whole words.

    With ``m = lane_words(n, bits)``, word ``j`` is the sum over ``k`` of ``2**(bits k)`` times value
    ``k * m + j``; values past the end are 0. The sum of such words is the word of the values' sums, as
    long as those are below ``2**(bits - 1)`` in magnitude; then no partial sum overflows a word. A word
    of zeros adds nothing.

    Args:
        values: the integers, each below ``2**(bits - 1)`` in magnitude; shape=(..., n), dtype int32.
        bits: the number of bits in a lane, 2 to 16.

    Returns:
        shape=(..., lane_words(n, bits)), dtype int32.
    """
    *rows, count = values.shape
    lanes, size = WORD_BITS // bits, lane_words(count, bits)
    padded = np.zeros((*rows, lanes * size), np.int64)
    padded[..., :count] = values
    weights = np.int64(1) << (bits * np.arange(lanes, dtype=np.int64))[:, None]
    return (padded.reshape(*rows, lanes, size) * weights).sum(axis=-2).astype(np.int32)


def unpack_lanes(words: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_lanes`, for one rank's words or a sum of ranks' words.

    Returns:
        The integers, shape=(..., count), dtype int32.
    """
    *rows, size = words.shape
    lanes, half = WORD_BITS // bits, 1 << (bits - 1)
    shifts = bits * np.arange(lanes, dtype=np.int64)[:, None]
    biased = words.astype(np.int64) + (np.int64(half) << shifts).sum()
    values = (biased[..., None, :] >> shifts & (2 * half - 1)) - half
    return values.astype(np.int32).reshape(*rows, lanes * size)[..., :count]
