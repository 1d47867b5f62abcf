"""Jobs whose ranks come and go, and checks that would notice what was lost."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.churn import __main__, checks, events
from benchmarks.churn.reports import Report

FIRST = Report(
    run=1,
    step=10,
    rank=0,
    size=2,
    host="localhost",
    process=100,
    seconds=0.0,
    weights="a",
    loss=2.0,
    sent=0.05,
    missing=1e-7,
    unsent=1.0,
    gradients=10.0,
    memory=10**8,
)
SECOND = dataclasses.replace(FIRST, rank=1, process=101)


def _changed(**changes: object) -> Report:
    return dataclasses.replace(SECOND, **changes)  # type: ignore[arg-type]


def test_a_healthy_job_has_no_problems() -> None:
    reports = [FIRST, SECOND]
    assert not checks.replicas(reports) + checks.conservation(reports) + checks.memory(reports, 1e6)
    assert not checks.compression(reports, 0.6)


def test_ranks_whose_weights_differ_are_found() -> None:
    assert checks.replicas([FIRST, _changed(weights="b")]) == [
        "step 10: ranks [0, 1] have different weights"
    ]
    # After a reset, the same step can have other weights: it was made by other ranks.
    assert not checks.replicas([FIRST, _changed(weights="b", run=2)])


def test_two_ranks_with_one_number_are_found() -> None:
    assert len(checks.replicas([FIRST, _changed(rank=0)])) == 1


def test_a_lost_residual_is_found() -> None:
    (problem,) = checks.conservation([FIRST, _changed(missing=0.3)])
    assert problem.startswith("step 10, rank 1: gradients of norm 0.3 are neither applied")
    assert not checks.conservation([_changed(missing=None)])


def test_an_interval_without_compression_is_found() -> None:
    assert len(checks.compression([FIRST, _changed(sent=1.0)], 0.6)) == 1


def test_memory_that_grows_and_a_loss_that_does_not_fall_are_found() -> None:
    grows = [_changed(memory=10**8 + step * 10**6) for step in range(100)]
    assert checks.memory(grows, 30e6) == ["a process has grown by 74.0 MB"]
    assert len(checks.learning(grows)) == 1
    assert not checks.learning([*grows[:20], *(_changed(loss=1.0) for _ in range(20))])


def test_residuals_that_grow_are_found() -> None:
    norms = [1.0, 1.5, 1.2, 2.9]
    assert not checks.residuals([_changed(unsent=norm) for norm in norms])
    assert len(checks.residuals([_changed(unsent=norm) for norm in [*norms, 3.1, 3.1]])) == 1


def test_steps_that_get_slower_are_measured() -> None:
    steady = [dataclasses.replace(FIRST, seconds=step) for step in range(40)]
    slower = [dataclasses.replace(one, seconds=one.seconds**2) for one in steady]
    assert checks.slowdown(steady) == 1.0
    assert checks.slowdown(slower) > 3


@pytest.mark.parametrize("hosts", range(events.FEWEST, events.MOST + 1))
def test_every_kind_of_event_comes_in_an_order_in_which_it_can_happen(hosts: int) -> None:
    orders = {tuple(events.shuffled(random.Random(seed), hosts)) for seed in range(1000)}
    assert len(orders) == 24 / (1 if events.FEWEST < hosts < events.MOST else 2)
    for order in orders:
        assert sorted(order) == sorted(events.EVENTS)
        changes = accumulate((events.EVENTS[kind].change for kind in order), initial=hosts)
        assert all(events.FEWEST <= number <= events.MOST for number in changes)


@pytest.mark.torch
def test_nothing_grows_where_nothing_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "churn.json"
    arguments = ["--undisturbed", "400", "--compression", "onebit"]
    status = __main__.main([*arguments, "--json", str(out)])
    assert status == 0, capsys.readouterr().out
    (job,) = json.loads(out.read_text())["jobs"]
    assert job["steps"] >= 400 and not job["events"]
    assert 0 < job["missing"] < checks.KEPT and job["unsent"][1] > 0


@pytest.mark.torch
def test_nothing_is_lost_when_ranks_come_and_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of event happens at least once, however long that takes."""
    whole, out = __main__._what, tmp_path / "churn.json"
    shorter = functools.partial(dataclasses.replace, seconds=20.0)
    monkeypatch.setattr(__main__, "_what", lambda *given: shorter(whole(*given)))
    arguments = ["--minutes", "1", "--compression", "onebit:exchange=two_shot"]
    status, printed = __main__.main([*arguments, "--json", str(out)]), capsys.readouterr().out
    assert status == 0, printed
    assert "\n| onebit:exchange=two_shot | " in printed
    (job,) = json.loads(out.read_text())["jobs"]
    assert set(job["events"]) == set(events.EVENTS)
    assert job["missing"] < checks.KEPT and job["steps"] > 50


def test_what_a_hierarchy_sends_within_hosts_is_not_compressed() -> None:
    most = __main__._most_sent
    assert most("onebit:exchange=hierarchical", 2) == 1 + most("onebit", 2) == 1 + most("ecq", 1)
    assert most("onebit:exchange=hierarchical", 1) == __main__.MOST_SENT
