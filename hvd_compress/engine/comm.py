"""The collectives that an exchange may ask for, and an exchange that waits for one.

An exchange is a generator that yields :class:`Collective`. Drivers start these collectives and send back
the results. Drivers do not depend on exchanges, nor exchanges on drivers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.autograd import profiler

from hvd_compress.exchanges.base import Group, Scope
from hvd_compress.ranks.counters import Counters

Sending = Generator["Collective", torch.Tensor, torch.Tensor]
"""A part of an exchange: yields collectives, receives their results, and returns the combined result."""

Exchanging = Generator["Collective", torch.Tensor, None]
"""A running exchange: yields collectives, and receives their results."""


_NO_LABEL = nullcontext()


def phase(name: str) -> AbstractContextManager[object]:
    """Labels the work in the ``with`` block as ``hvd_compress::NAME`` in the traces of ``torch.profiler``.

    Without a profiler, this is only the test whether there is one.

    Args:
        name: ``"encode"``, ``"send"``, ``"average"`` or ``"decode"``.
    """
    if not profiler._is_profiler_enabled:
        return _NO_LABEL
    return profiler.record_function(f"hvd_compress::{name}")


def byte_count(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; of a sparse tensor, the bytes of its indices and values."""
    if tensor.is_sparse:
        return byte_count(tensor._indices()) + byte_count(tensor._values())
    return tensor.numel() * tensor.element_size()


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
    message: torch.Tensor
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
    def own(self) -> torch.Tensor | None:
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

    def all_gather(self, message: torch.Tensor, *, remainder: bool = False) -> Collective:
        """Gathers all ranks' messages, shape=(n,), on every rank; the result has shape=(size, n)."""
        return Collective(
            "all_gather", message, self.size, self.rank, self.scope, remainder=remainder
        )

    def all_to_all(
        self, message: torch.Tensor, sizes: Sequence[int], *, remainder: bool = False
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

    def all_reduce(self, values: torch.Tensor, op: Literal["sum", "max"] = "sum") -> Collective:
        """Computes the element-wise sum or maximum on every rank; ``values`` may be overwritten."""
        return Collective("all_reduce", values, self.size, self.rank, self.scope, (), op)


class Content:
    """The gradients that an exchange sends together.

    Args:
        deferred: whether the host must not wait for the gradients' device.

    Attributes:
        error: the first error on this rank; None without one.
        nonfinite: whether some rank sent an Inf or a NaN, or a sum became one, as far as the host knows.
        word: a word on the device, shape=(1,), int32, not 0 if some rank sent an Inf or a NaN, or a sum
            became one; None unless only the device knows.
    """

    error: Exception | None = None
    nonfinite = False
    word: torch.Tensor | None = None

    def __init__(self, deferred: bool) -> None:
        self._deferred = deferred
        self._counts = Counters()

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients over the gradients."""
        raise NotImplementedError

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Ends the step; ``dropped`` as from :func:`hvd_compress.engine.batch.judge`."""

    def see(self, finite: torch.Tensor) -> None:
        """Drops the step if some number was not finite: loss scalers skip such a step.

        ``finite`` says whether all were, shape=(), bool, on the gradients' device.
        """
        if self._deferred:
            word = finite.logical_not().int().view(1)
            self.word = word if self.word is None else self.word | word
        else:
            self.nonfinite |= not bool(finite)

    def note(self, collective: Collective) -> None:
        """Counts the bytes of a collective; called with every collective that the exchange asks for."""
        # Not the collective itself: its message must not be kept until the step is over.
        collective.count(self._counts)

    def count(self, counters: Counters) -> None:
        """Adds the bytes sent, the elements encoded and the times to the counters."""
        counters.add(self._counts)


class Pending:
    """The running exchange of a bucket.

    Args:
        name: the name of the exchange's collectives, the same on every rank.
        number: the exchange's position in an order that is the same on every rank.
        exchanging: the generator. The constructor runs it up to its first collective, so that it encodes.
        content: the gradients of the bucket, which count every collective that the exchange asks for.

    Attributes:
        name: the name of the exchange's collectives.
        content: the gradients of the bucket.
        stage: the number of collectives that are over, without remainders.
        request: the collective that the exchange waits for; None at the end.
        error: the error of the generator or of a collective; None without one.
    """

    def __init__(self, name: str, number: int, exchanging: Exchanging, content: Content) -> None:
        self.name = name
        self.content = content
        self.number = number
        self.stage = 0
        self.request: Collective | None = None
        self.error: Exception | None = None
        self._exchanging = exchanging
        self._go_on(lambda: next(exchanging))

    @property
    def label(self) -> str:
        """The name of the collective that the exchange waits for."""
        remainder = self.request is not None and self.request.remainder
        return f"{self.name}, stage {self.stage}" + ", remainder" * remainder

    @property
    def place(self) -> tuple[int, bool, int]:
        """The position of the collective that the exchange waits for, in the order in which ranks wait."""
        remainder = self.request is not None and self.request.remainder
        return self.stage, remainder, self.number

    def resume(self, result: torch.Tensor) -> None:
        """Continues with a collective's result, to the next collective or to the end; never raises."""
        self._go_on(lambda: self._exchanging.send(result))

    def fail(self, error: Exception) -> None:
        """Ends the exchange with an error; only the first error is kept."""
        self.request = None
        self.error = self.error or error

    @torch.no_grad()
    def _go_on(self, step: Callable[[], Collective]) -> None:
        try:
            self._ask(step())
            while self.request is not None and self.request.own is not None:
                self._ask(self._exchanging.send(self.request.own))
        except StopIteration:
            self.request = None
        except Exception as error:
            self.fail(error)

    def _ask(self, request: Collective) -> None:
        # A remainder belongs to the stage before, whether some ranks of a host need one or not.
        if self.request is not None and not request.remainder:
            self.stage += 1
        self.request = request
        self.content.note(request)
