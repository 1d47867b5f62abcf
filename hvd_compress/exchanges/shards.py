"""Which rank owns which part of a tensor, where ranks share the work of adding it up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape, as_matrix, round_up

GRAIN = 1024
"""Shards begin at multiples of this many elements: 16 tiles of 64, so that a shard's scales and header stay
small beside its codes. Only rows and columns are longer: then it is the shortest run of whole ones that has
as many elements."""


@dataclass(frozen=True)
class Shards:
    """A tensor's elements in contiguous ranges, one a rank.

    Ranges differ by at most one grain in length. A tensor of fewer grains than ranks leaves some ranks
    without a part; ``first`` turns the parts round, so that it is not the same ranks for every tensor.

    Attributes:
        count: elements of the tensor.
        size: ranks.
        first: the rank that owns the tensor's first part; any integer, the tensor's number is a good one.
        row: elements that stay together, as two values of a payload are those of a row; 1 if none have to.
    """

    count: int
    size: int
    first: int = 0
    row: int = 1

    @property
    def grain(self) -> int:
        """Shards begin at multiples of this many elements."""
        return round_up(GRAIN, self.row)

    def shape(self, length: int) -> Shape:
        """Of the tensor as which a part of so many elements is encoded."""
        return (length,) if self.row == 1 else (length // self.row, self.row)

    def of(self, rank: int) -> tuple[int, int]:
        """The range [begin, end) of elements that a rank owns, possibly empty."""
        part = (rank - self.first) % self.size
        grain = self.grain
        grains = -(-self.count // grain)
        begin, end = (grain * (p * grains // self.size) for p in (part, part + 1))
        return min(begin, self.count), min(end, self.count)

    def length(self, rank: int) -> int:
        """How many elements a rank owns."""
        begin, end = self.of(rank)
        return end - begin

    def lengths(self) -> Counter[int]:
        """How many ranks own how many elements: ``Counter(map(self.length, range(self.size)))``, at once.

        For who asks about more ranks than there are.
        """
        grain = self.grain
        grains = -(-self.count // grain)
        short = grain * grains - self.count
        few, more = divmod(grains, self.size)
        last = grain * (few + (more > 0))
        owners = Counter({grain * few: self.size - more})
        owners[grain * (few + 1)] += more
        owners[last] -= 1
        owners[last - short] += 1
        return +owners

    def payload_bytes(self, codec: Codec) -> list[int]:
        """Bytes of each rank's part as a payload; 0 where it owns nothing."""
        lengths = (self.length(rank) for rank in range(self.size))
        return [codec.payload_bytes(self.shape(length)) if length else 0 for length in lengths]


@dataclass(frozen=True)
class Shared:
    """A gradient as the ranks share it out: what is cut into parts, and what encodes a part.

    Groups that are rows stay whole: parts are cut between rows. Columns are not contiguous, so that the
    gradient is transposed first: its columns are rows then. Parts, owners' residuals and the state of owner
    steps are in this order.

    Attributes:
        codec: what a part is encoded with.
        count: elements of the gradient.
        row: elements that stay together; 1 if none have to.
        transposed: rows and columns of the gradient, if it is transposed before it is cut, or None.
    """

    codec: Codec
    count: int
    row: int = 1
    transposed: tuple[int, int] | None = None

    def shards(self, size: int, first: int = 0) -> Shards:
        """The parts of so many ranks; see :class:`Shards`."""
        return Shards(self.count, size, first, self.row)


@lru_cache(maxsize=4096)
def shared(codec: Codec, shape: Shape) -> Shared:
    """How ranks share out a gradient.

    Args:
        codec: what the gradient is encoded with.
        shape: the gradient's.
    """
    count = math.prod(shape)
    if not (codec.shaped and count):
        return Shared(codec, count)
    by_rows, transposed = codec.by_rows()
    rows, columns = as_matrix(shape)
    if transposed:
        return Shared(by_rows, count, rows, (rows, columns))
    return Shared(by_rows, count, columns)


def transpose(x: np.ndarray, matrix: tuple[int, int] | None) -> np.ndarray:
    """The elements of a matrix in the order of its columns, shape=(n,), a copy.

    Args:
        x: in row-major order, shape=(n,).
        matrix: rows and columns; None leaves the order as it is.
    """
    return x.copy() if matrix is None else x.reshape(matrix).T.reshape(-1).copy()


def transpose_back(x: np.ndarray, matrix: tuple[int, int] | None) -> np.ndarray:
    """The inverse of :func:`transpose`."""
    return transpose(x, None if matrix is None else (matrix[1], matrix[0]))


def tells_of_a_failure(header: bytes) -> bool:
    """Whether zeros came in a payload's place: who sent them had an error, and the others must not wait.

    Args:
        header: the payload's header.
    """
    return not any(header)
