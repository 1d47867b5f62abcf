"""Starts the collectives of pending buckets in the same order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvd_compress.distributed.collectives import Collectives, Over
from hvd_compress.exchange.registry import Exchange, Group, Scope
from hvd_compress.torch_common.drivers import Pending

Begin = Callable[[Collectives], None]

_REMAINDERS = -1
"""In the place of a stage's number: collectives that are rare share a line."""


class Line:
    """A process group of its own, and launch tickets for it.

    Collectives of torch.distributed have no names: ranks must start those of a group in the same order.
    Hooks take tickets in the order of the buckets, and a collective waits until those before it have been
    started. A thread that comes early leaves its collective to the thread whose turn it is.

    Args:
        collectives: the ranks, in a group that no other line uses.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._lock = threading.Lock()
        self._tickets = 0
        self._next = 0
        self._ready: dict[int, Begin] = {}
        self._starting = False

    def close(self) -> None:
        """As of the group."""
        self._collectives.close()

    def ticket(self) -> int:
        """A number, to be taken in the same order on every rank."""
        self._tickets += 1
        return self._tickets - 1

    def start(self, ticket: int, begin: Begin) -> None:
        """Calls ``begin`` with the group, now or after the tickets before; never two at a time."""
        with self._lock:
            self._ready[ticket] = begin
        while True:
            # Not under the lock: what is begun may be over at once, and call this for another ticket.
            with self._lock:
                if self._starting or self._next not in self._ready:
                    return
                now = self._ready.pop(self._next)
                self._starting = True
            try:
                now(self._collectives)
            finally:
                with self._lock:
                    self._next += 1
                    self._starting = False


class _Tickets:
    """Those of one exchange.

    Args:
        stages: the lines of its collectives; None where this rank is alone.
        remainders: the lines of those that it may need behind them.
    """

    def __init__(self, stages: Sequence[Line | None], remainders: Sequence[Line | None]) -> None:
        self._stages = [(line, line.ticket()) if line else None for line in stages]
        self._remainders = [(line, line.ticket()) for line in remainders if line]

    def start(self, pending: Pending, begin: Begin) -> None:
        """Calls ``begin`` when it is the turn of the collective that the exchange waits for."""
        assert pending.request is not None
        remainder = pending.request.remainder
        ticket = self._remainders.pop(0) if remainder else self._stages[pending.stage]
        assert ticket is not None, "a collective of one rank has its result without being started"
        line, number = ticket
        line.start(number, begin)

    def end(self) -> None:
        """Has others go on that wait for remainders of this exchange, which do not come."""
        for line, number in self._remainders:
            line.start(number, lambda group: None)


class Launcher:
    """Resumes exchanges from the callbacks of their collectives: a driver for torch.distributed.

    Hooks, which DDP calls in the same order on every rank, start the first collectives. But these end in
    another order on each rank, and so would their successors start: so every stage has its own line, and
    all remainders have one. An exchange that needs no remainders gives its tickets for them back at its
    end.

    Args:
        collectives: all ranks.
        group: the same ranks.
    """

    def __init__(self, collectives: Collectives, group: Group) -> None:
        self._collectives = collectives
        self._group = group
        self._first = Line(collectives)
        self._lines: dict[tuple[int, Scope], Line] = {}

    def prepare(self, exchange: Exchange, packed: bool) -> None:
        """Makes the process groups for an exchange's collectives.

        Called when all ranks have agreed on their exchanges, by every rank; waits for the others.

        Args:
            exchange: that will be submitted.
            packed: whether its messages are packed (:func:`hvd_compress.exchange.packing.packs`).
        """
        keys = list(enumerate(exchange.stages))
        if packed:
            keys += [(_REMAINDERS, scope) for scope in exchange.remainders]
        for number, scope in keys:
            ranks = self._group.members(scope)
            key = (number, scope)
            if key not in self._lines and len(ranks) > 1 and key != (0, "all"):
                self._lines[key] = Line(self._collectives.among(ranks))

    def close(self) -> None:
        """Closes the connections of all its groups."""
        for line in (self._first, *self._lines.values()):
            line.close()

    def submit(
        self,
        pending: Pending,
        stages: Sequence[Scope],
        remainders: Sequence[Scope],
        over: Over,
    ) -> None:
        """Has an exchange run through its stages. Returns at once.

        Args:
            pending: the exchange.
            stages: the scopes of its collectives, which are prepared.
            remainders: the scopes of those that it may need behind them, which are prepared.
            over: called at its end.
        """
        tickets = _Tickets(
            [self._line(number, scope) for number, scope in enumerate(stages)],
            [self._line(_REMAINDERS, scope) for scope in remainders],
        )
        self._go_on(pending, tickets, over)

    def _line(self, number: int, scope: Scope) -> Line | None:
        return self._first if (number, scope) == (0, "all") else self._lines.get((number, scope))

    def _go_on(self, pending: Pending, tickets: _Tickets, over: Over) -> None:
        if pending.request is None:
            tickets.end()
            with self._collectives.behind():
                over(pending.error)
            return
        tickets.start(pending, lambda group: self._begin(group, pending, tickets, over))

    def _begin(
        self,
        group: Collectives,
        pending: Pending,
        tickets: _Tickets,
        over: Over,
    ) -> None:
        assert pending.request is not None

        def arrived(error: Exception | None) -> None:
            # A future drops what a callback raises, such as a MemoryError; who waits would wait on.
            try:
                if error is None:
                    pending.resume(result)
                    self._go_on(pending, tickets, over)
                    return
            except Exception as problem:
                error = problem
            over(error)

        try:
            result, work = group.start(pending.request)
            group.when_over(work, arrived)
        except Exception as error:
            over(error)
