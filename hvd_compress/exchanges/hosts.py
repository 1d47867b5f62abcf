"""Ranks on hosts: who shares one, and who has the same local rank on another."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hvd_compress.codecs import Codec
from hvd_compress.exchanges.limits import MAX_GATHERED_BYTES
from hvd_compress.exchanges.shards import Shards


@dataclass(frozen=True)
class Hosts:
    """``size`` ranks, ``local`` on each host, numbered host by host.

    Attributes:
        size: ranks of the job.
        local: ranks of a host.
    """

    size: int
    local: int

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return self.size // self.local

    def local_rank(self, rank: int) -> int:
        """A rank's number on its host."""
        return rank % self.local

    def within(self, rank: int) -> list[int]:
        """The ranks of this rank's host."""
        first = rank - rank % self.local
        return list(range(first, first + self.local))

    def between(self, rank: int) -> list[int]:
        """The ranks with this local rank, one on each host."""
        return list(range(rank % self.local, self.size, self.local))

    def groups(self) -> list[list[int]]:
        """All that :meth:`within` and :meth:`between` can be, in the same order on every rank."""
        local_ranks = range(self.local)
        hosts = range(0, self.size, self.local)
        return [self.within(rank) for rank in hosts] + [self.between(rank) for rank in local_ranks]


def usable(size: int, local: int, equal: bool) -> bool:
    """Whether a hierarchy makes sense: equal hosts of several ranks, and process sets at any time.

    Args:
        size: ranks of the job.
        local: ranks of this host.
        equal: whether every host has as many.
    """
    dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
    return dynamic and equal and 1 < local < size


def describe(rank: int, size: int, local_rank: int, local_size: int, cross_rank: int) -> str:
    """What ranks compare: the same text on all of them if, and only if, :class:`Hosts` describes them.

    Args:
        rank: this rank.
        size: ranks of the job.
        local_rank: its number on its host.
        local_size: ranks on its host.
        cross_rank: the number of its host among those that have such a local rank.
    """
    if rank == cross_rank * local_size + local_rank and size % local_size == 0:
        return f"{local_size} ranks each, numbered host by host"
    return f"rank {rank} as local rank {local_rank} of {local_size} on host {cross_rank}"


def check(name: str, codec: Codec, shards: Shards, hosts: Hosts, element_bytes: int) -> None:
    """Raises ``ValueError`` where a tensor cannot take the hierarchical exchange.

    Args:
        name: the tensor's.
        codec: what its parts are encoded with.
        shards: its parts.
        hosts: the ranks.
        element_bytes: of an element in its own dtype.
    """
    largest = max(
        shards.count * element_bytes,
        hosts.local * max(map(shards.length, range(shards.size))) * element_bytes,
        hosts.count * sum(shards.payload_bytes(codec)),
    )
    if largest > MAX_GATHERED_BYTES:
        raise ValueError(
            f"{name}: expected at most {MAX_GATHERED_BYTES} bytes in one message, got {largest}; exclude "
            f"the tensor"
        )
