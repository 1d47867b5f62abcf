"""Starts the collectives of pending buckets in the same order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from hvd_compress.engine.drivers import Pending
from hvd_compress.exchanges.registry import Exchange, Group, Scope
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.ranks.errors import ExchangeError

Begin = Callable[[Collectives], None]

_REMAINDERS = -1
"""In the place of a stage's number: collectives that are rare share a line."""


class Ticket:
    """The right to start one collective of a line; used once.

    Args:
        line: the collective's.
        number: its place in the line.
    """

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number
        self._used = False

    def start(self, begin: Begin, over: Over) -> None:
        """Calls ``begin`` with the line's group, now or after the tickets before; never two at a time.

        Args:
            begin: starts the collective. Where it raises, other ranks may have started theirs, so the line
                is lost.
            over: called with what ``begin`` has raised; or in place of it, with the reason, where the line
                is lost.
        """
        self._used = True
        self._line._start(self._number, begin, over)

    def end(self, error: Exception | None) -> None:
        """Has those behind it go on if it was not used.

        Args:
            error: None where no rank starts this collective. Otherwise others may have: they would take
                what comes behind it for it, so the line is lost.
        """
        if self._used:
            return
        if error is None:
            self.start(lambda group: None, lambda problem: None)
        else:
            self.start(lambda group: self._line._lose(error), lambda problem: None)


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
        self._ready: dict[int, tuple[Begin, Over]] = {}
        self._starting = False
        self._lost: Exception | None = None

    def close(self) -> None:
        """As of the group."""
        self._collectives.close()

    def ticket(self) -> Ticket:
        """The next one; to be taken in the same order on every rank."""
        self._tickets += 1
        return Ticket(self, self._tickets - 1)

    def _start(self, number: int, begin: Begin, over: Over) -> None:
        with self._lock:
            self._ready[number] = begin, over
        while True:
            # Not under the lock: what is begun may be over at once, and call this for another ticket.
            with self._lock:
                if self._starting or self._next not in self._ready:
                    return
                begin, over = self._ready.pop(self._next)
                self._starting = True
            try:
                self._begin(begin, over)
            finally:
                with self._lock:
                    self._next += 1
                    self._starting = False

    def _begin(self, begin: Begin, over: Over) -> None:
        if self._lost is not None:
            over(self._lost)
            return
        try:
            begin(self._collectives)
        except Exception as error:
            self._lose(error)
            over(error)

    def _lose(self, error: Exception) -> None:
        self._lost = ExchangeError(
            f"expected no exchange after one that failed on this rank, whose place in the order of the "
            f"other ranks is lost, got another one: end the job, or begin anew with another process group. "
            f"The first error: {type(error).__name__}: {error}"
        )


class _Tickets:
    """Those of one exchange.

    Args:
        stages: the lines of its collectives; None where this rank is alone.
        remainders: the lines of those that it may need behind them.
    """

    def __init__(self, stages: Sequence[Line | None], remainders: Sequence[Line | None]) -> None:
        self._stages = [line.ticket() if line else None for line in stages]
        self._remainders = [line.ticket() for line in remainders if line]

    def start(self, pending: Pending, begin: Begin, over: Over) -> None:
        """As of the ticket of the collective that the exchange waits for."""
        assert pending.request is not None
        remainder = pending.request.remainder
        ticket = self._remainders.pop(0) if remainder else self._stages[pending.stage]
        assert ticket is not None, "a collective of one rank has its result without being started"
        ticket.start(begin, over)

    def end(self, error: Exception | None) -> None:
        """Has others go on that wait for collectives of this exchange, which do not come."""
        for ticket in (*self._stages, *self._remainders):
            if ticket is not None:
                ticket.end(error)


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
            packed: whether its messages are packed (:func:`hvd_compress.exchanges.packing.packs`).
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
        _Course(self._collectives, pending, tickets, over).go_on()

    def _line(self, number: int, scope: Scope) -> Line | None:
        return self._first if (number, scope) == (0, "all") else self._lines.get((number, scope))


class _Course:
    """One exchange, from its first collective to its end."""

    def __init__(
        self, collectives: Collectives, pending: Pending, tickets: _Tickets, over: Over
    ) -> None:
        self._collectives = collectives
        self._pending = pending
        self._tickets = tickets
        self._over = over

    def go_on(self) -> None:
        """Starts the collective that the exchange waits for, or ends it."""
        if self._pending.request is not None:
            self._tickets.start(self._pending, self._begin, self._end)
            return
        with self._collectives.behind():
            self._end(self._pending.error)

    def _begin(self, group: Collectives) -> None:
        assert self._pending.request is not None
        result, work = group.start(self._pending.request)
        group.when_over(work, lambda error: self._arrived(result, error))

    def _arrived(self, result: torch.Tensor, error: Exception | None) -> None:
        # A future drops what a callback raises, such as a MemoryError; who waits would wait on.
        try:
            if error is None:
                self._pending.resume(result)
                self.go_on()
                return
        except Exception as problem:
            error = problem
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if error is None:
            self._tickets.end(None)
            self._over(None)
        else:
            self._over(error)  # First: it is the cause of what those behind it get.
            self._tickets.end(error)
