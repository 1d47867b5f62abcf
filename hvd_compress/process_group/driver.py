"""Resumes exchanges from the callbacks of their collectives: a driver for torch.distributed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch

from hvd_compress.engine.run import Run, phase
from hvd_compress.exchanges.comm import Collective, Group, Scope
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.ranks.errors import ExchangeError

_REMAINDERS = -1
"""The number that stands for all remainders, in place of a stage's number."""


@dataclass(eq=False)
class _Line:
    """A process group, and the runs that may still start a collective in it, in the order of submission.

    On devices, several lines may have the same process group: there, the calls alone decide on the order.
    """

    collectives: Collectives
    places: deque[_Place] = field(default_factory=deque)
    starting: bool = False


@dataclass(eq=False)
class _Place:
    """The place of a run among the runs in the same lines.

    Attributes:
        stages: the line of each stage; None for this rank alone.
        remainders: the lines of the remainders that may still follow.
        begun: the number of stages whose collectives have been started.
        ready: the line in which the run waits to start a collective, and the run.
        error: the error for the runs behind this one, if other ranks may start collectives that this rank
            does not start.
    """

    stages: list[_Line | None]
    remainders: list[_Line]
    begun: int = 0
    ready: tuple[_Line, _Course] | None = None
    error: Exception | None = None

    @property
    def left(self) -> list[_Line]:
        """The lines in which the run may still start a collective."""
        lines = dict.fromkeys((*self.stages[self.begun :], *self.remainders))
        return [line for line in lines if line is not None]

    def uses(self, line: _Line) -> bool:
        """Whether the run may still start a collective in a line."""
        return line in self.stages[self.begun :] or line in self.remainders


@dataclass(eq=False)
class _Course:
    """A run on its way through its stages."""

    run: Run
    over: Over
    lags: bool
    place: _Place


class Driver:
    """Runs exchanges through their stages.

    Collectives of torch.distributed have no names, so ranks must start those of a process group in the same
    order. All ranks submit runs in the same order, but collectives end in a different order on each rank,
    and the next stages would start in that order. Therefore every stage has a line, and all remainders
    share one; on CPUs, each line has a process group of its own. A run starts a collective when no run that
    was submitted earlier can still start one in that line. A thread that comes too early leaves the start
    to another thread.

    Where no other thread waits for results, runs that may lag go one stage further in each :meth:`turn`. So
    the order of all collectives depends only on the order of the calls.

    Args:
        collectives: the collectives among all ranks.
        group: the same ranks.
        stages: the number of stages that share one line, in the process group of ``collectives``.

    Attributes:
        prepared: the exchanges that :meth:`prepare` was called for.
    """

    def __init__(self, collectives: Collectives, group: Group, stages: int = 1) -> None:
        self._collectives = collectives
        self._group = group
        line = _Line(collectives)
        self._lines: dict[tuple[int, Scope], _Line] = {
            (stage, "all"): line for stage in range(stages)
        }
        self._lock = threading.Lock()
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
                    self._lines[key] = _Line(self._collectives.among(ranks))
        self.prepared |= exchanges

    def close(self) -> None:
        """Closes this rank's connections in all process groups."""
        for collectives in {line.collectives for line in self._lines.values()}:
            collectives.close()

    def submit(self, run: Run, over: Over, *, lags: bool = False) -> None:
        """Runs an exchange through its stages. Returns at once.

        Args:
            run: the exchange, which has been prepared.
            over: a function that is called at the end of the exchange.
            lags: whether the exchange may wait for a :meth:`turn` before it goes on to its next stage.
        """
        stages = [self._lines.get(key) for key in enumerate(run.stages)]
        rest = [self._lines.get((_REMAINDERS, scope)) for scope in run.remainders]
        place = _Place(stages, [line for line in rest if line is not None])
        with self._lock:
            for line in place.left:
                line.places.append(place)
        self._go_on(_Course(run, over, lags, place))

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

    def _go_on(self, course: _Course) -> None:
        """Starts the collective that a run waits for, or ends the run."""
        run, place = course.run, course.place
        if run.request is None:
            with self._collectives.behind():
                self._end(course, run.error)
            return
        line = place.remainders[0] if run.request.remainder else place.stages[run.stage]
        assert line is not None, "a collective of one rank has its result without being started"
        with self._lock:
            place.ready = line, course
        self._advance(line)

    def _advance(self, *lines: _Line) -> None:
        """Starts the collectives whose turn it is, unless another thread is doing so in their line.

        A line never waits for another one: when :meth:`submit` returns, the first collective has been
        started, so that it comes before what the caller then starts in its own process group.
        """
        takes: list[Callable[[], None]] = []
        for line in lines:
            while True:
                with self._lock:
                    found = None if line.starting else _next(line)
                    if found is None:
                        break
                    line.starting = True
                try:
                    self._start(line, *found, takes)
                finally:
                    line.starting = False
        # Last: what is over already is decoded at once, and no other collective should wait for that.
        for take in takes:
            take()

    def _start(
        self,
        line: _Line,
        course: _Course,
        lost: Exception | None,
        takes: list[Callable[[], None]],
    ) -> None:
        if lost is not None:
            self._end(course, lost)
            return
        run, place, group = course.run, course.place, line.collectives
        assert run.request is not None
        try:
            with phase("send"):
                result, work = group.start(run.request)
        except Exception as error:
            self._end(course, error)
            return
        with self._lock:
            if run.request.remainder:
                place.remainders.pop(0)
            else:
                place.begun = run.stage + 1

        def take() -> None:
            # The thread may be that of another run, which must not end for want of memory for this one.
            try:
                group.when_over(work, lambda error: self._arrived(course, result, error))
            except Exception as error:
                self._end(course, error)

        last = run.stage == len(place.stages) - 1
        (self._lagging if course.lags and group.lags(last) else takes).append(take)

    def _arrived(self, course: _Course, result: torch.Tensor, error: Exception | None) -> None:
        # A future drops what a callback raises, such as a MemoryError; who waits would wait on.
        try:
            if error is None:
                course.run.resume(result)
                self._go_on(course)
                return
        except Exception as problem:
            error = problem
        self._end(course, error)

    def _end(self, course: _Course, error: Exception | None) -> None:
        if error is not None:
            course.over(error)  # First: it is the cause of what those behind it get.
        place = course.place
        with self._lock:
            left = place.left
            if error is None:
                place.stages, place.remainders = [], []
            else:
                place.error = _no_order(error)
        self._advance(*left)
        if error is None:
            course.over(None)


def _next(line: _Line) -> tuple[_Course, Exception | None] | None:
    """The run whose turn it is in a line, and the error if the line's order is lost."""
    places = line.places
    while places and not places[0].uses(line):
        places.popleft()
    lost = places[0].error if places else None
    # Behind a place that is lost, no run has to wait for another.
    for place in places if lost is not None else islice(places, 1):
        if place.ready is not None and place.ready[0] is line:
            course = place.ready[1]
            place.ready = None
            return course, lost
    return None


def _no_order(error: Exception) -> ExchangeError:
    return ExchangeError(
        f"expected no exchange after one that failed on this rank, whose place in the order of the "
        f"other ranks is lost, got another one: end the job, or begin anew with another process group. "
        f"The first error: {type(error).__name__}: {error}"
    )
