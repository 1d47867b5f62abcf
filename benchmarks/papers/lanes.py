"""The levels of an integer sum in lanes of words, in NumPy (``docs/format.md``, "Packed codes")."""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs import LevelCodec, base, packing


def pack_levels(codec: LevelCodec, levels: np.ndarray, bits: int) -> np.ndarray:
    """Packs levels block by block: shape=(level_words,), dtype int32."""
    block = codec.layout(levels.shape).block
    parts = [pack_lanes(part, bits) for part in base.groups_of(levels, block)]
    return np.concatenate([np.empty(0, np.int32), *parts])


def unpack_levels(codec: LevelCodec, words: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_levels`, for one rank's words or a sum of ranks' words.

    Returns:
        The levels, shape=(count,), dtype int32.
    """
    lengths = [int(n) for n in base.group_lengths(count, codec.layout((count,)).block)]
    ends = np.cumsum([packing.lane_words(length, bits) for length in lengths])
    parts = [
        unpack_lanes(part, length, bits)
        for part, length in zip(np.split(words, ends[:-1]), lengths, strict=False)
    ]
    return np.concatenate([np.empty(0, np.int32), *parts])


def pack_lanes(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs integers into words that can be added as whole words.

    With ``m = lane_words(n, bits)``, word ``j`` is the sum over ``k`` of ``2**(bits k)`` times value
    ``k * m + j``; values past the end are 0. The sum of such words is the word of the values' sums, as
    long as those are below ``2**(bits - 1)`` in magnitude; then no partial sum overflows a word. A word
    of zeros adds nothing.

    Args:
        values: the integers, each below ``2**(bits - 1)`` in magnitude; shape=(n,), dtype int32.
        bits: the number of bits in a lane, 2 to 16.

    Returns:
        shape=(lane_words(n, bits),), dtype int32.
    """
    lanes, size = packing.WORD_BITS // bits, packing.lane_words(values.size, bits)
    padded = np.zeros(lanes * size, np.int64)
    padded[: values.size] = values
    weights = np.int64(1) << (bits * np.arange(lanes, dtype=np.int64))[:, None]
    return (padded.reshape(lanes, size) * weights).sum(axis=0).astype(np.int32)


def unpack_lanes(words: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The inverse of :func:`pack_lanes`, for one rank's words or a sum of ranks' words.

    Returns:
        The integers, shape=(count,), dtype int32.
    """
    lanes, half = packing.WORD_BITS // bits, 1 << (bits - 1)
    shifts = bits * np.arange(lanes, dtype=np.int64)[:, None]
    biased = words.astype(np.int64) + (np.int64(half) << shifts).sum()
    values = (biased >> shifts & (2 * half - 1)) - half
    return values.astype(np.int32).reshape(-1)[:count]
