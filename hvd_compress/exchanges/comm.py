"""The collectives that an exchange may ask for, and the ranks that take part in them.

An exchange is a generator that yields :class:`Collective`. Drivers start these collectives and send back
the results. Drivers do not depend on exchanges, nor exchanges on drivers. Messages are arrays of the
driver's framework, which this module does not import.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.ranks.counters import Counters

Array = Any
"""An array of the framework whose gradients are exchanged, such as ``torch.Tensor``."""

Sending = Generator["Collective", Array, Array]
"""A part of an exchange: yields collectives, receives their results, and returns the combined result."""

Exchanging = Generator["Collective", Array, None]
"""A running exchange: yields collectives, and receives their results."""

Scope = Literal["all", "local", "cross"]
"""The ranks of a collective: all, those of this host, or those with this local rank on all hosts."""


@dataclass(frozen=True)
class Group:
    """The ranks of an exchange.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        hosts: the ranks on their hosts; None if the exchange does not need them.
    """

    rank: int
    size: int
    hosts: Hosts | None = None

    def members(self, scope: Scope) -> list[int]:
        """The ranks that take part in this rank's collectives of the given scope."""
        if scope == "all" or self.hosts is None:
            return list(range(self.size))
        return (self.hosts.within if scope == "local" else self.hosts.between)(self.rank)


def byte_count(tensor: Array) -> int:
    """The bytes of a tensor's elements; of a sparse tensor, the bytes of its indices and values."""
    if tensor.is_sparse:
        return byte_count(tensor._indices()) + byte_count(tensor._values())
    count: int = tensor.numel() * tensor.element_size()
    return count


@dataclass(eq=False)
class Collective:
    """One collective that an exchange asks for; a driver starts it and sends back its result.

    Attributes:
        kind: the kind of the collective.
        message: this rank's contribution, shape=(n,); n is the same on every rank.
        ranks: the number of ranks that take part.
        rank: this rank's number among the ranks that take part.
        scope: the ranks that take part.
        sizes: the bytes for each rank in an all_to_all, the same on every rank; they add up to n.
        op: the operation of an all_reduce.
        remainder: whether the collective sends the rest of messages for which an earlier collective of the
            exchange was too short.
    """

    kind: Literal["all_gather", "all_to_all", "all_reduce"]
    message: Array
    ranks: int
    rank: int
    scope: Scope
    sizes: Sequence[int] = ()
    op: Literal["sum", "max"] = "sum"
    remainder: bool = False
    skips_alone: ClassVar[bool] = True
    """Whether a rank among no others takes its own message as the result, without a collective. A check of
    collectives on a machine with one device sets it to False."""

    @property
    def own(self) -> Array | None:
        """The result if no other rank takes part, see :attr:`skips_alone`; otherwise None."""
        if self.ranks > 1 or not Collective.skips_alone:
            return None
        return self.message if self.kind == "all_reduce" else self.message.view(1, -1)

    def count(self, counters: Counters) -> None:
        """Adds the bytes that this rank sends to the counters."""
        if self.ranks == 1:
            return
        before = counters.wire_bytes
        size = byte_count(self.message)
        if self.kind == "all_gather":
            counters.add_allgather(self.ranks, size)
        elif self.kind == "all_to_all":
            counters.add_alltoall(size, self.sizes[self.rank])
        else:
            counters.add_allreduce(self.ranks, size)
        if self.scope == "local":
            counters.local_bytes += counters.wire_bytes - before


class Comm:
    """Makes collectives among some of an exchange's ranks.

    Args:
        group: the exchange's ranks.
        scope: the ranks that take part.

    Attributes:
        rank: this rank's number among the ranks of the scope; -1 if this rank is not one of them.
        size: the number of ranks in the scope.
    """

    def __init__(self, group: Group, scope: Scope = "all") -> None:
        self.group = group
        self.scope = scope
        members = group.members(scope)
        self.size = len(members)
        # A rank that is not among them makes no collectives.
        self.rank = members.index(group.rank) if group.rank in members else -1

    @property
    def local(self) -> Comm:
        """The collectives among the ranks of this host."""
        return Comm(self.group, "local")

    @property
    def cross(self) -> Comm:
        """The collectives among the ranks with this local rank, one on each host."""
        return Comm(self.group, "cross")

    def all_gather(self, message: Array, *, remainder: bool = False) -> Collective:
        """Gathers all ranks' messages, shape=(n,), on every rank; the result has shape=(size, n)."""
        return Collective(
            "all_gather", message, self.size, self.rank, self.scope, remainder=remainder
        )

    def all_to_all(
        self, message: Array, sizes: Sequence[int], *, remainder: bool = False
    ) -> Collective:
        """Sends each rank its part of every rank's message, as rows in rank order.

        Args:
            message: the ranks' parts one after the other, shape=(n,), uint8.
            sizes: the bytes of each part, the same on every rank.
            remainder: see :class:`Collective`.

        Returns:
            A collective whose result has shape=(size, sizes[rank]).
        """
        return Collective(
            "all_to_all",
            message,
            self.size,
            self.rank,
            self.scope,
            tuple(sizes),
            remainder=remainder,
        )

    def all_reduce(self, values: Array, op: Literal["sum", "max"] = "sum") -> Collective:
        """Computes the element-wise sum or maximum on every rank; ``values`` may be overwritten."""
        return Collective("all_reduce", values, self.size, self.rank, self.scope, (), op)
