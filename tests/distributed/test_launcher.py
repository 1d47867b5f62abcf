"""The order in which a process group's collectives start."""

from __future__ import annotations

import datetime
import time
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hvd_compress.process_group import collectives
from hvd_compress.process_group.agreement import compare_in_turn, make_line
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.launcher import Line
from hvd_compress.process_group.private import job_store
from hvd_compress.ranks.errors import ExchangeError
from tests.ranks import on_ranks


def _never(problem: Exception | None) -> None:
    raise AssertionError(problem)


def test_tickets_are_served_in_order() -> None:
    line = Line("the group")  # type: ignore[arg-type]
    tickets = [line.ticket() for _ in range(4)]
    begun: list[tuple[int, object]] = []

    def begin(ticket: int) -> Any:
        def call(group: object) -> None:
            begun.append((ticket, group))
            if ticket == 1:
                tickets[3].start(begin(3), _never)  # As where a collective is over at once.

        return call

    tickets[2].start(begin(2), _never)
    tickets[1].start(begin(1), _never)
    assert not begun
    tickets[0].start(begin(0), _never)
    assert begun == [(ticket, "the group") for ticket in range(4)]


def test_nothing_starts_behind_a_collective_that_is_missing_on_this_rank_alone() -> None:
    line = Line("the group")  # type: ignore[arg-type]
    first, unused, lost, behind = (line.ticket() for _ in range(4))
    begun: list[object] = []
    told: list[Exception | None] = []
    behind.start(begun.append, told.append)
    lost.end(MemoryError("no memory"))
    unused.end(None)
    assert not begun and not told
    first.start(begun.append, _never)
    first.end(MemoryError("of the exchange, whose collective has been started"))
    assert begun == ["the group"] and len(told) == 1
    line.ticket().start(begun.append, told.append)
    assert begun == ["the group"] and len(told) == 2
    for error in told:
        with pytest.raises(ExchangeError, match="first error: MemoryError: no memory"):
            raise error or AssertionError


def test_nothing_starts_behind_a_collective_that_this_rank_could_not_start() -> None:
    line = Line("the group")  # type: ignore[arg-type]
    told: list[Exception | None] = []

    def fail(group: object) -> None:
        raise MemoryError("no memory for the result")

    line.ticket().start(fail, told.append)
    line.ticket().start(_never, told.append)  # type: ignore[arg-type]
    first, second = told
    assert isinstance(first, MemoryError)
    with pytest.raises(
        ExchangeError, match=r"place in the order .* MemoryError: no memory for the"
    ):
        raise second or AssertionError


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
    line = make_line(collectives_of(None))
    own: list[dict[str, Any]] = [{"a": 1, "empty": {}}, {"a": 1}]
    answers: SimpleQueue[Exception | None] = SimpleQueue()
    compare_in_turn(line, own[dist.get_rank()], answers.put)
    with pytest.raises(ExchangeError, match=r"empty: \{\} on rank 0, absent on rank 1"):
        raise answers.get(timeout=60) or AssertionError
