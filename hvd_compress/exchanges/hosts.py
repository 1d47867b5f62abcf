"""The ranks that share a host, and those with the same local rank on all hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """``size`` ranks, with ``local`` of them on each host, numbered host by host.

    Attributes:
        size: the number of ranks in the job.
        local: the number of ranks on each host.
    """

    size: int
    local: int

    @property
    def count(self) -> int:
        """The number of hosts."""
        return self.size // self.local

    def local_rank(self, rank: int) -> int:
        """A rank's number on its host."""
        return rank % self.local

    def within(self, rank: int) -> list[int]:
        """The ranks on the host of the given rank."""
        first = rank - rank % self.local
        return list(range(first, first + self.local))

    def between(self, rank: int) -> list[int]:
        """The ranks with the local rank of the given rank, one on each host."""
        return list(range(rank % self.local, self.size, self.local))

    def groups(self) -> list[list[int]]:
        """All results of :meth:`within` and :meth:`between`, in the same order on every rank."""
        local_ranks = range(self.local)
        hosts = range(0, self.size, self.local)
        return [self.within(rank) for rank in hosts] + [self.between(rank) for rank in local_ranks]


def usable(size: int, local: int, equal: bool) -> bool:
    """Whether a hierarchy makes sense: several equal hosts with several ranks, and dynamic process sets.

    The job has ``size`` ranks, this host ``local``; ``equal`` says whether all hosts have as many.
    """
    dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
    return dynamic and equal and 1 < local < size


def describe(rank: int, size: int, local_rank: int, local_size: int, cross_rank: int) -> str:
    """A text for ranks to compare: it is the same on all ranks if and only if :class:`Hosts` fits them.

    Args:
        rank: this rank.
        size: the number of ranks in the job.
        local_rank: the number of this rank on its host.
        local_size: the number of ranks on this rank's host.
        cross_rank: the number of this rank's host among the hosts that have this local rank.
    """
    if rank == cross_rank * local_size + local_rank and size % local_size == 0:
        return f"{local_size} ranks each, numbered host by host"
    return f"rank {rank} as local rank {local_rank} of {local_size} on host {cross_rank}"
