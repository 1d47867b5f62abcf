"""Resumes exchanges from the callbacks of their collectives: a driver for torch.distributed."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
class _Place:
    """The place of a run among the runs that use the same process groups.

    Attributes:
        stages: the process group of each stage; None for this rank alone.
        remainders: the process groups of the remainders that may still follow.
        begun: the number of stages whose collectives have been started.
        ready: the process group in which the run waits to start a collective, and the run.
        error: the error for the runs behind this one, if other ranks may start collectives that this rank
            does not start.
    """

    stages: list[Collectives | None]
    remainders: list[Collectives]
    begun: int = 0
    ready: tuple[Collectives, _Course] | None = None
    error: Exception | None = None

    @property
    def left(self) -> list[Collectives]:
        """The process groups in which the run may still start a collective."""
        groups = dict.fromkeys((*self.stages[self.begun :], *self.remainders))
        return [group for group in groups if group is not None]

    def uses(self, group: Collectives) -> bool:
        """Whether the run may still start a collective in a process group."""
        return group in self.stages[self.begun :] or group in self.remainders


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
    and the next stages would start in that order. Therefore every stage has a process group of its own, and
    all remainders share one. A run starts a collective when no run that was submitted earlier can still
    start one in that group. A thread that comes too early leaves the start to another thread.

    Where no other thread waits for results, runs that may lag go one stage further in each :meth:`turn`. So
    the order of all collectives depends only on the order of the calls.

    Args:
        collectives: the collectives among all ranks.
        group: the same ranks.
        stages: the number of stages that share the process group of ``collectives``.

    Attributes:
        prepared: the exchanges that :meth:`prepare` was called for.
    """

    def __init__(self, collectives: Collectives, group: Group, stages: int = 1) -> None:
        self._collectives = collectives
        self._group = group
        self._groups: dict[tuple[int, Scope], Collectives] = {
            (stage, "all"): collectives for stage in range(stages)
        }
        self._lock = threading.Lock()
        # The runs that may still start a collective in a process group, in the order of submission.
        self._queues: defaultdict[Collectives, deque[_Place]] = defaultdict(deque)
        self._starting: set[Collectives] = set()
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
                if key not in self._groups and meets:
                    self._groups[key] = self._collectives.among(ranks)
        self.prepared |= exchanges

    def close(self) -> None:
        """Closes this rank's connections in all process groups."""
        for group in set(self._groups.values()):
            group.close()

    def submit(self, run: Run, over: Over, *, lags: bool = False) -> None:
        """Runs an exchange through its stages. Returns at once.

        Args:
            run: the exchange, which has been prepared.
            over: a function that is called at the end of the exchange.
            lags: whether the exchange may wait for a :meth:`turn` before it goes on to its next stage.
        """
        stages = [self._groups.get(key) for key in enumerate(run.stages)]
        rest = [self._groups.get((_REMAINDERS, scope)) for scope in run.remainders]
        place = _Place(stages, [group for group in rest if group is not None])
        with self._lock:
            for group in place.left:
                self._queues[group].append(place)
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
        group = place.remainders[0] if run.request.remainder else place.stages[run.stage]
        assert group is not None, "a collective of one rank has its result without being started"
        with self._lock:
            place.ready = group, course
        self._advance(group)

    def _advance(self, *groups: Collectives) -> None:
        """Starts the collectives whose turn it is, unless another thread is doing so in their group.

        A group is never waited for because of another one: when :meth:`submit` returns, the first
        collective has been started, so that it comes before what the caller then starts in its own group.
        """
        takes: list[Callable[[], None]] = []
        for group in groups:
            while True:
                with self._lock:
                    found = None if group in self._starting else self._next(group)
                    if found is None:
                        break
                    self._starting.add(group)
                try:
                    self._start(group, *found, takes)
                finally:
                    with self._lock:
                        self._starting.remove(group)
        # Last: what is over already is decoded at once, and no other collective should wait for that.
        for take in takes:
            take()

    def _next(self, group: Collectives) -> tuple[_Course, Exception | None] | None:
        """The run whose turn it is in a group, and the error if the group's order is lost."""
        queue = self._queues[group]
        while queue and not queue[0].uses(group):
            queue.popleft()
        lost = queue[0].error if queue else None
        # Behind a place that is lost, no run has to wait for another.
        for place in queue if lost is not None else islice(queue, 1):
            if place.ready is not None and place.ready[0] is group:
                course = place.ready[1]
                place.ready = None
                return course, lost
        return None

    def _start(
        self,
        group: Collectives,
        course: _Course,
        lost: Exception | None,
        takes: list[Callable[[], None]],
    ) -> None:
        if lost is not None:
            self._end(course, lost)
            return
        run, place = course.run, course.place
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
            group.when_over(work, lambda error: self._arrived(course, result, error))

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


def _no_order(error: Exception) -> ExchangeError:
    return ExchangeError(
        f"expected no exchange after one that failed on this rank, whose place in the order of the "
        f"other ranks is lost, got another one: end the job, or begin anew with another process group. "
        f"The first error: {type(error).__name__}: {error}"
    )
