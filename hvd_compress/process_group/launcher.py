"""Starts the collectives of pending buckets in the same order on every rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hvd_compress.engine.pending import Pending, phase
from hvd_compress.exchanges.comm import Collective, Group, Scope
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.ranks.errors import ExchangeError

Begin = Callable[[Collectives], None]

_REMAINDERS = -1
"""The number of the line that all remainders share, in place of a stage's number."""


class Ticket:
    """The right to start one collective of a line; used once."""

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number
        self._used = False

    def start(self, begin: Begin, over: Over) -> None:
        """Calls ``begin`` with the line's group, at once or after the earlier tickets, never two at a time.

        Args:
            begin: a function that starts the collective. If it raises, other ranks may have started their
                collective, so the line is lost.
            over: a function that is called with the error of ``begin``; or, if the line is lost already,
                with the reason, in place of ``begin``.
        """
        self._used = True
        self._line._start(self._number, begin, over)

    def end(self, error: Exception | None) -> None:
        """Gives the ticket back if it was not used, so that later ones go on.

        Args:
            error: None if no rank starts this collective. Otherwise, other ranks may have started it and
                would mistake the next collective for it, so the line is lost.
        """
        if self._used:
            return
        if error is None:
            self.start(lambda group: None, lambda problem: None)
        else:
            self.start(lambda group: self._line._lose(error), lambda problem: None)


class Line:
    """A process group and launch tickets for its collectives.

    Collectives of torch.distributed have no names, so ranks must start those of a group in the same order.
    Hooks take tickets in the order of the buckets, and a collective waits until the earlier ones have been
    started. A thread that is too early leaves its collective to the thread whose turn it is.

    Args:
        collectives: the collectives among the ranks, in a group that no other line uses.
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
        """Closes this rank's connections in the line's group."""
        self._collectives.close()

    def ticket(self) -> Ticket:
        """Takes the next ticket; every rank has to take tickets in the same order."""
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


@dataclass(eq=False)
class Part:
    """Tensors of a bucket that are sent together.

    Attributes:
        pending: their exchange.
        stages: the scopes of the exchange's collectives.
        remainders: the scopes of the additional collectives if messages were too short.
    """

    pending: Pending
    stages: tuple[Scope, ...]
    remainders: tuple[Scope, ...] = ()


class Launcher:
    """Resumes exchanges from the callbacks of their collectives: a driver for torch.distributed.

    Hooks, which DDP calls in the same order on every rank, start the first collectives. These end in a
    different order on each rank, and the next collectives would start in that order. Therefore every stage
    has its own line, and all remainders share one. An exchange that needs no remainders returns their
    tickets at its end.

    Where no other thread waits for results, exchanges that may lag go one stage further in each
    :meth:`turn`. So the order of all collectives depends only on the order of the calls.

    Args:
        collectives: the collectives among all ranks.
        group: the same ranks.

    Attributes:
        prepared: the exchanges that :meth:`prepare` was called for.
    """

    def __init__(self, collectives: Collectives, group: Group) -> None:
        self._collectives = collectives
        self._group = group
        # By a stage's number and scope.
        self._lines: dict[tuple[int, Scope], Line] = {(0, "all"): Line(collectives)}
        self._lagging: deque[Callable[[], None]] = deque()
        self.prepared: set[tuple[str, bool]] = set()

    def prepare(self, exchanges: set[tuple[str, bool]]) -> None:
        """Makes the process groups for the collectives of exchanges.

        Every rank calls it when all ranks have agreed on their exchanges; waits for the other ranks.

        Args:
            exchanges: the names of exchanges that will be submitted, and whether their messages are packed,
                because payloads vary in length.
        """
        for name, packed in sorted(exchanges - self.prepared):
            keys = list(enumerate(EXCHANGES[name].stages))
            if packed:
                keys += [(_REMAINDERS, scope) for scope in EXCHANGES[name].remainders]
            for key in keys:
                ranks = self._group.members(key[1])
                meets = len(ranks) > 1 or not Collective.skips_alone
                if key not in self._lines and meets:
                    self._lines[key] = Line(self._collectives.among(ranks))
        self.prepared |= exchanges

    def close(self) -> None:
        """Closes this rank's connections in the groups of all lines."""
        for line in self._lines.values():
            line.close()

    def submit(self, part: Part, over: Over, *, lags: bool = False) -> None:
        """Runs an exchange through its stages. Returns at once.

        Args:
            part: the exchange, which has been prepared.
            over: a function that is called at the end of the exchange.
            lags: whether the exchange may wait for a :meth:`turn` before it goes on to its next stage.
        """
        stages = [self._lines.get(key) for key in enumerate(part.stages)]
        remainders = [self._lines.get((_REMAINDERS, scope)) for scope in part.remainders]
        _Course(
            self._collectives,
            part.pending,
            [line.ticket() if line else None for line in stages],
            [line.ticket() for line in remainders if line],
            over,
            self._lagging if lags else None,
        ).go_on()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Moves earlier exchanges that lag one stage further, after those submitted in the block."""
        earlier = len(self._lagging)
        yield
        for _ in range(earlier):
            self._lagging.popleft()()

    def catch_up(self) -> None:
        """Completes all exchanges that lag."""
        while self._lagging:
            self._lagging.popleft()()


@dataclass(eq=False)
class _Course:
    """One exchange, from its first collective to its end."""

    collectives: Collectives
    pending: Pending
    stages: list[Ticket | None]  # None for a collective of this rank alone.
    remainders: list[Ticket]
    over: Over
    lagging: deque[Callable[[], None]] | None  # The results that are taken later.

    def go_on(self) -> None:
        """Starts the collective that the exchange waits for, or ends the exchange."""
        request = self.pending.request
        if request is None:
            with self.collectives.behind():
                self._end(self.pending.error)
            return
        stage = self.pending.stage
        ticket = self.remainders.pop(0) if request.remainder else self.stages[stage]
        assert ticket is not None, "a collective of one rank has its result without being started"
        ticket.start(self._begin, self._end)

    def _begin(self, group: Collectives) -> None:
        assert self.pending.request is not None
        with phase("send"):
            result, work = group.start(self.pending.request)

        def take() -> None:
            group.when_over(work, lambda error: self._arrived(result, error))

        last = self.pending.stage == len(self.stages) - 1
        if self.lagging is not None and group.lags(last):
            self.lagging.append(take)
        else:
            take()

    def _arrived(self, result: torch.Tensor, error: Exception | None) -> None:
        # A future drops what a callback raises, such as a MemoryError; who waits would wait on.
        try:
            if error is None:
                self.pending.resume(result)
                self.go_on()
                return
        except Exception as problem:
            error = problem
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            self.over(error)  # First: it is the cause of what those behind it get.
        for ticket in (*self.stages, *self.remainders):
            if ticket is not None:
                ticket.end(error)
        if error is None:
            self.over(None)
