"""A randomized Hadamard rotation: it spreads each number over its whole group, and keeps norms.

The signs of random elements change, then a Hadamard matrix multiplies the group (Suresh, Yu, Kumar and
McMahan, "Distributed Mean Estimation with Limited Communication", ICML 2017, section 3). A group with one
large element becomes one with many of similar size, which a few levels represent well.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hvd_compress.codecs.noise import philox

_KEY = (0, 0xFFFFFFFF)
"""The key of the signs, which are the same in every step, on every rank and in every group."""

_BITS = 128
"""The number of signs from one block of the generator."""

LARGEST = np.float32(2.0**119)
"""The largest norm of a rotated group: what is decoded stays below it times the square root of 65,536."""


def rotate(x: np.ndarray, group: int) -> np.ndarray:
    """Rotates each group of a tensor; the last one in pieces, whose sizes are powers of two.

    Args:
        x: the tensor, shape=(n,), dtype float32.
        group: the number of elements in a group, a power of two.

    Returns:
        shape=(n,), dtype float32.
    """
    return _by_piece(x * _signs_of(x.size, group), group)


def rotate_back(x: np.ndarray, group: int) -> np.ndarray:
    """The inverse of :func:`rotate`, except for rounding."""
    return _by_piece(x, group) * _signs_of(x.size, group)


def _by_piece(x: np.ndarray, group: int) -> np.ndarray:
    whole = x.size // group * group
    pieces = [_transformed(x[:whole].reshape(-1, group)).reshape(-1)]
    begin, size = whole, group
    while begin < x.size:
        if size <= x.size - begin:
            pieces.append(_transformed(x[begin : begin + size].reshape(1, size)).reshape(-1))
            begin += size
        size //= 2
    return np.concatenate(pieces)


def _transformed(rows: np.ndarray) -> np.ndarray:
    """The rows times a Hadamard matrix over the root of its size.

    All numbers are multiplied by the reciprocal of the root first. Then, for distances of 1, 2, 4 ..., each
    pair of elements at this distance becomes their sum and their difference, each rounded to float32.
    """
    size = rows.shape[1]
    rows = rows * np.float32(math.sqrt(1 / size))
    distance = 1
    while distance < size:
        pairs = rows.reshape(-1, 2, distance)
        first, second = pairs[:, 0], pairs[:, 1]
        rows = np.stack([first + second, first - second], 1).reshape(-1, size)
        distance *= 2
    return rows


def _signs_of(count: int, group: int) -> np.ndarray:
    return np.resize(_signs(group), count)


@lru_cache
def _signs(group: int) -> np.ndarray:
    """A group's signs: element ``i`` has -1 where bit ``i mod 32`` of the word ``i // 32`` is 1."""
    counter = np.zeros((4, -(-group // _BITS)), np.uint32)
    counter[0] = np.arange(counter.shape[1])
    words = np.ascontiguousarray(philox(counter, _KEY).T)
    bits = np.unpackbits(words.view(np.uint8).reshape(-1), bitorder="little")[:group]
    return np.where(bits, np.float32(-1), np.float32(1)).astype(np.float32)
