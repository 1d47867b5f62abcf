"""The order in which a process group's collectives start."""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hvd_compress.engine.run import Content, Run
from hvd_compress.exchanges.comm import Collective, Group, Sending
from hvd_compress.process_group import collectives
from hvd_compress.process_group.agreement import make_comparisons
from hvd_compress.process_group.collectives import Collectives, Over
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.driver import Driver, _Line
from hvd_compress.process_group.private import job_store
from hvd_compress.ranks.errors import ExchangeError
from tests.ranks import on_ranks


class _Group:
    """A process group whose collectives are over when a test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started: list[int] = []
        self.running: list[tuple[int, Over]] = []
        self.broken = self.deaf = False
        self.before: Callable[[], object] = int

    def start(self, collective: Collective) -> tuple[torch.Tensor, int]:
        if self.broken:
            raise MemoryError("no memory for the result")
        number = int(collective.message)
        self.before()
        self.started.append(number)
        return collective.message, number

    def when_over(self, work: int, over: Over) -> None:
        if self.deaf:
            raise MemoryError("no memory for the callback")
        self.running.append((work, over))

    def lags(self, last: bool) -> bool:
        return False

    def behind(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self, number: int = -1, error: Exception | None = None) -> None:
        """Ends a collective; without its number, the latest one."""
        position = [work for work, _ in self.running].index(number) if number >= 0 else -1
        self.running.pop(position)[1](error)


class _Rank:
    """A rank's driver of exchanges that have two stages, and as many remainders as a test asks for."""

    def __init__(self) -> None:
        self.groups = [_Group(name) for name in ("first", "second", "remainders")]
        first, second, remainders = cast(list[Collectives], self.groups)
        self.driver = Driver(first, Group(0, 2))
        self.driver._lines |= {(1, "all"): _Line(second), (-1, "all"): _Line(remainders)}
        self.ended: dict[int, Exception | None] = {}

    def submit(self, number: int, *, more: int = 0, fails: bool = False) -> None:
        """Submits the run of a number; ``fails`` says whether its work between two stages fails."""

        def exchanging() -> Sending:
            message = torch.tensor([number])
            yield Collective("all_gather", message, 2, 0, "all")
            for _ in range(more):
                yield Collective("all_gather", message, 2, 0, "all", remainder=True)
            if fails:
                raise MemoryError("no memory between the stages")
            yield Collective("all_gather", message, 2, 0, "all")

        run = Run(exchanging(), Content(deferred=False), ("all", "all"), ("all", "all"))
        self.driver.submit(run, lambda error: self.ended.update({number: error}))

    def end_all(self, rng: random.Random) -> None:
        """Ends collectives in a random order, until none is left."""
        while running := [(group, work) for group in self.groups for work, _ in group.running]:
            group, work = rng.choice(running)
            group.end(work)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_start_collectives_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    more = [rng.choice((0, 0, 1, 2)) for _ in range(8)]
    started: list[list[list[int]]] = []
    for _ in range(3):
        rank = _Rank()
        for number, count in enumerate(more):
            rank.submit(number, more=count)
            if rng.random() < 0.5:
                rank.end_all(rng)
        rank.end_all(rng)
        assert rank.ended == dict.fromkeys(range(len(more)))
        started.append([group.started for group in rank.groups])
    numbers = list(range(len(more)))
    remainders = [number for number, count in enumerate(more) for _ in range(count)]
    assert started == [[numbers, numbers, remainders]] * 3


def test_a_stage_waits_for_the_earlier_runs() -> None:
    rank = _Rank()
    first, second, _ = rank.groups
    for number in range(3):
        rank.submit(number)
    first.end(2)
    first.end(1)
    assert first.started == [0, 1, 2] and not second.started
    first.end(0)
    assert second.started == [0, 1, 2] and not rank.ended
    second.end(1)
    assert rank.ended == {1: None}


def test_a_first_collective_starts_before_submit_returns() -> None:
    """The caller may start others in this group next, as DDP does; ranks would mix them up."""
    rank, starting, go_on = _Rank(), threading.Event(), threading.Event()
    rank.groups[1].before = lambda: (starting.set(), go_on.wait(60))
    rank.submit(0)
    other = threading.Thread(target=rank.groups[0].end)
    other.start()
    assert starting.wait(60)
    rank.submit(1)
    assert rank.groups[0].started == [0, 1]
    go_on.set()
    other.join()
    rank.end_all(random.Random(0))
    assert rank.ended == dict.fromkeys(range(2))


def test_nothing_starts_behind_a_collective_that_is_missing_on_this_rank_alone() -> None:
    rank = _Rank()
    first, second, _ = rank.groups
    for number in range(4):
        rank.submit(number, fails=number == 1)
    for number in (3, 2, 1):
        first.end(number)
    assert list(rank.ended) == [1]  # The run before it can still start, as on the other ranks.
    first.end(0)
    assert second.started == [0]
    second.end(0)
    assert rank.ended[0] is None
    rank.submit(4)
    first.end(4)
    assert second.started == [0] and first.started == [0, 1, 2, 3, 4]
    for number in (2, 3, 4):
        with pytest.raises(ExchangeError, match="first error: MemoryError: no memory between"):
            raise rank.ended[number] or AssertionError


def test_nothing_starts_behind_a_collective_that_this_rank_could_not_start() -> None:
    rank = _Rank()
    rank.groups[1].broken = True
    for number in range(2):
        rank.submit(number)
    rank.end_all(random.Random(0))
    assert isinstance(rank.ended[0], MemoryError)
    with pytest.raises(
        ExchangeError, match=r"place in the order .* MemoryError: no memory for the"
    ):
        raise rank.ended[1] or AssertionError


def test_a_result_that_cannot_be_waited_for_is_an_error_of_its_own_run() -> None:
    rank = _Rank()
    first, second, _ = rank.groups
    rank.submit(0)
    rank.submit(1)
    first.end(1)
    second.deaf = True
    first.end(0)  # Starts the second stages of both runs.
    assert second.started == [0, 1]
    assert all(isinstance(rank.ended[number], MemoryError) for number in range(2))


def test_an_error_of_a_last_collective_leaves_the_remainders_without_an_order() -> None:
    rank = _Rank()
    rank.submit(0)
    rank.groups[0].end()
    rank.groups[1].end(0, ConnectionError("closed"))
    assert isinstance(rank.ended[0], ConnectionError)
    rank.submit(1)
    rank.submit(2, more=1)
    rank.end_all(random.Random(0))
    assert rank.ended[1] is None
    with pytest.raises(ExchangeError, match="first error: ConnectionError: closed"):
        raise rank.ended[2] or AssertionError


@on_ranks(3, launcher="torchrun")
def test_groups_for_further_stages_have_the_timeout_of_the_ranks_own() -> None:
    seconds = datetime.timedelta(seconds=77)
    group = dist.new_group(timeout=seconds)
    collectives = Collectives(group)
    for ranks in ([0, 1, 2], [dist.get_rank()]):
        made = collectives.among(ranks)._group
        assert made is not None and made is not group
        assert made._get_backend(torch.device("cpu")).options._timeout == seconds


@on_ranks(3, launcher="torchrun")
def test_groups_of_the_script_after_one_of_some_ranks() -> None:
    """PyTorch names the script's by a count of groups, which has to be the same on all ranks."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert Collectives(pair).among([0, 1]).gather_numbers(rank) == [[0], [1]]
    everybodys = Collectives(dist.new_group([0, 1, 2]))
    assert everybodys.gather_numbers(rank) == [[0], [1], [2]]


@on_ranks(3, launcher="torchrun", alone=True)  # The ranks have other counts of groups then.
def test_a_group_after_one_of_some_ranks_of_the_script() -> None:
    rank = dist.get_rank()
    if rank > 0:
        dist.new_group([1, 2], use_local_synchronization=True)
    assert Collectives(None).among([2, 0, 1]).gather_numbers(rank) == [[2], [0], [1]]


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_is_late_to_a_new_group() -> None:
    """It is waited for as long as the group waits for a collective; the log tells."""
    ranks = Collectives(dist.new_group([0, 1], timeout=datetime.timedelta(seconds=77)))
    lines: list[Any] = []
    if dist.get_rank() == 1:
        time.sleep(2)
    with (
        mock.patch.object(collectives, "_REPORTED", 0.2),
        mock.patch.object(collectives._log, "warning", lambda *line: lines.append(line)),
    ):
        ranks.among([0, 1])
    assert dist.get_rank() == 1 or lines


@on_ranks(2, launcher="torchrun")
def test_a_new_group_is_complete_on_all_ranks() -> None:
    """Otherwise a rank could free it while another one is still connecting."""
    key, rank, make = "test_launcher/connected", dist.get_rank(), collectives.make_group

    def late(*arguments: Any) -> dist.ProcessGroup:
        group = make(*arguments)
        time.sleep(1)
        job_store().set(key, "")
        return group

    with mock.patch.object(collectives, "make_group", make if rank == 1 else late):
        Collectives(None).among([0, 1])
    assert job_store().check([key])


@on_ranks(2, launcher="torchrun")
def test_configurations_that_differ_in_an_empty_part_alone() -> None:
    """It is a setting as others are; the comparison ends on every rank."""
    comparisons = make_comparisons(collectives_of(None))
    own: list[dict[str, Any]] = [{"a": 1, "empty": {}}, {"a": 1}]
    answers: SimpleQueue[Exception | None] = SimpleQueue()
    comparisons.start(own[dist.get_rank()], answers.put)
    with pytest.raises(ExchangeError, match=r"empty: \{\} on rank 0, absent on rank 1"):
        raise answers.get(timeout=60) or AssertionError
