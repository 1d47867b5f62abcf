"""Jobs whose ranks come and go, and checks that would notice what was lost."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from functools import partial
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


GROWS = [_changed(memory=10**8 + step * 10**6) for step in range(100)]
NORMS = [_changed(unsent=norm) for norm in (1.0, 1.5, 1.2, 2.9)]
LOST = "step 10, rank 1: gradients of norm 0.3 are neither applied"
CHECKS: dict[str, tuple[Callable[[list[Report]], list[str]], list[Report], list[Report], str]] = {
    # After a reset, the same step can have other weights: it was made by other ranks.
    "weights": (
        checks.replicas,
        [FIRST, _changed(weights="b", run=2)],
        [_changed(weights="b")],
        "step 10: ranks [0, 1] have different weights",
    ),
    "one number twice": (checks.replicas, [FIRST], [_changed(rank=0)], "disagree on who they are"),
    "lost residuals": (
        checks.conservation,
        [_changed(missing=None)],
        [_changed(missing=0.3)],
        LOST,
    ),
    "uncompressed": (partial(checks.compression, most=0.6), [FIRST], [_changed(sent=1.0)], ""),
    "memory": (
        lambda one: checks.memory(one, 30e6),
        GROWS[:20],
        GROWS[20:],
        "has grown by 74.0 MB",
    ),
    "loss": (checks.learning, [*GROWS[:20], *[_changed(loss=1.0)] * 20], GROWS, "expected at most"),
    "residuals": (checks.residuals, NORMS, [_changed(unsent=3.1)] * 2, ""),
}
"""Checks, reports without a problem, those that make one beside them, and words of the message."""


@pytest.mark.parametrize("name", CHECKS)
def test_a_problem_is_found(name: str) -> None:
    check, good, bad, words = CHECKS[name]
    assert not check(good)
    (problem,) = check([*good, *bad])
    assert words in problem


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
