"""The parts of a tensor that ranks own, for ranks that share the work of adding it up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape, as_matrix, round_up

GRAIN = 1024
"""Every shard begins at a multiple of this number of elements: 16 tiles of 64, so that a shard's scales and
header are small compared to its codes. If rows or columns must stay whole, the grain is instead the
smallest multiple of a row's elements that is not below this number."""


@dataclass(frozen=True)
class Shards:
    """A tensor's elements in contiguous ranges, one per rank.

    The lengths of ranges differ by at most one grain. If a tensor has fewer grains than there are ranks,
    some ranks have no part; ``first`` rotates the parts, so that these ranks vary between tensors.

    Attributes:
        count: the number of elements in the tensor.
        size: the number of ranks.
        first: the rank that owns the tensor's first part, modulo ``size``, such as the tensor's number.
        row: the number of elements that must stay together, because a row of them shares scales in a
            payload; 1 if there is no such row.
    """

    count: int
    size: int
    first: int = 0
    row: int = 1

    @property
    def grain(self) -> int:
        """The grain: every shard begins at a multiple of this number of elements."""
        return round_up(GRAIN, self.row)

    def shape(self, length: int) -> Shape:
        """The shape of the tensor that is encoded for a part of ``length`` elements."""
        return (length,) if self.row == 1 else (length // self.row, self.row)

    def of(self, rank: int) -> tuple[int, int]:
        """The range [begin, end) of elements that a rank owns, possibly empty."""
        part = (rank - self.first) % self.size
        grain = self.grain
        grains = -(-self.count // grain)
        begin, end = (grain * (p * grains // self.size) for p in (part, part + 1))
        return min(begin, self.count), min(end, self.count)

    def length(self, rank: int) -> int:
        """The number of elements that a rank owns."""
        begin, end = self.of(rank)
        return end - begin

    def lengths(self) -> Counter[int]:
        """The number of ranks by the number of elements that they own.

        Equal to ``Counter(map(self.length, range(self.size)))``, but without a loop over the ranks, for
        predictions about many ranks.
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
        """The bytes of the payload of each rank's part; 0 for a rank that owns nothing."""
        lengths = (self.length(rank) for rank in range(self.size))
        return [codec.payload_bytes(self.shape(length)) if length else 0 for length in lengths]


@dataclass(frozen=True)
class Shared:
    """The division of a gradient into the parts of ranks, with the codec of the parts.

    Groups that are rows stay whole: parts are cut between rows. Columns are not contiguous, so that the
    gradient is transposed first, which turns its columns into rows. Parts, owners' residuals and the state
    of owner steps are in this order.

    Attributes:
        codec: the codec that encodes a part.
        count: the number of elements in the gradient.
        row: the number of elements that must stay together; 1 if there is no such row.
        transposed: the rows and columns of the gradient, if it is transposed before it is cut, or None.
    """

    codec: Codec
    count: int
    row: int = 1
    transposed: tuple[int, int] | None = None

    def shards(self, size: int, first: int = 0) -> Shards:
        """The parts for ``size`` ranks; see :class:`Shards`."""
        return Shards(self.count, size, first, self.row)


@lru_cache(maxsize=4096)
def shared(codec: Codec, shape: Shape) -> Shared:
    """The division of a gradient among ranks."""
    count = math.prod(shape)
    if not (codec.shaped and count):
        return Shared(codec, count)
    by_rows, transposed = codec.by_rows()
    rows, columns = as_matrix(shape)
    if transposed:
        return Shared(by_rows, count, rows, (rows, columns))
    return Shared(by_rows, count, columns)


def transpose(x: np.ndarray, matrix: tuple[int, int] | None) -> np.ndarray:
    """A copy of a matrix's elements in the order of its columns, shape=(n,).

    Args:
        x: the elements in row-major order, shape=(n,).
        matrix: the numbers of rows and columns; None keeps the order.
    """
    return x.copy() if matrix is None else x.reshape(matrix).T.reshape(-1).copy()


def transpose_back(x: np.ndarray, matrix: tuple[int, int] | None) -> np.ndarray:
    """The inverse of :func:`transpose`."""
    return transpose(x, None if matrix is None else (matrix[1], matrix[0]))


def tells_of_a_failure(header: bytes) -> bool:
    """Whether zeros came in place of a payload's header: the sender failed, and wanted no one to wait."""
    return not any(header)
