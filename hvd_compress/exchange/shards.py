"""Which rank owns which part of a tensor, where ranks share the work of adding it up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hvd_compress.codecs import Codec

GRAIN = 1024
"""Shards begin at multiples of this many elements: 16 tiles of 64, so that a shard's scales and header stay
small beside its codes. It depends on no codec, so that a shard stays where it is when the codec changes."""


@dataclass(frozen=True)
class Shards:
    """A tensor's elements in contiguous ranges, one a rank.

    Ranges differ by at most one grain in length. A tensor of fewer grains than ranks leaves some ranks
    without a part; ``first`` turns the parts round, so that it is not the same ranks for every tensor.

    Attributes:
        count: elements of the tensor.
        size: ranks.
        first: the rank that owns the tensor's first part; any integer, the tensor's number is a good one.
    """

    count: int
    size: int
    first: int = 0

    def of(self, rank: int) -> tuple[int, int]:
        """The range [begin, end) of elements that a rank owns, possibly empty."""
        part = (rank - self.first) % self.size
        grains = -(-self.count // GRAIN)
        begin, end = (GRAIN * (p * grains // self.size) for p in (part, part + 1))
        return min(begin, self.count), min(end, self.count)

    def length(self, rank: int) -> int:
        """How many elements a rank owns."""
        begin, end = self.of(rank)
        return end - begin

    def lengths(self) -> Counter[int]:
        """How many ranks own how many elements: ``Counter(map(self.length, range(self.size)))``, at once.

        For who asks about more ranks than there are.
        """
        grains = -(-self.count // GRAIN)
        short = GRAIN * grains - self.count
        few, more = divmod(grains, self.size)
        last = GRAIN * (few + (more > 0))
        owners = Counter({GRAIN * few: self.size - more})
        owners[GRAIN * (few + 1)] += more
        owners[last] -= 1
        owners[last - short] += 1
        return +owners

    def payload_bytes(self, codec: Codec) -> list[int]:
        """Bytes of each rank's part as a payload; 0 where it owns nothing."""
        lengths = (self.length(rank) for rank in range(self.size))
        return [codec.payload_bytes((length,)) if length else 0 for length in lengths]


def check_codec(name: str, codec: Codec, exchange: str) -> None:
    """Raises ``ValueError`` where a codec cannot encode parts of a tensor."""
    if codec.shaped:
        raise ValueError(
            f"{name}: expected a codec of contiguous groups for exchange={exchange!r}, got {codec!r}: a "
            f"part is a range of elements, without rows and columns; use another group or another exchange"
        )


def tells_of_a_failure(header: bytes) -> bool:
    """Whether zeros came in a payload's place: who sent them had an error, and the others must not wait.

    Args:
        header: the payload's header.
    """
    return not any(header)
