"""The contest between ``Auto`` and fixed choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import auto, launch


def test_the_ratio_is_taken_round_by_round() -> None:
    # The machine became twice as slow in mid-contest, for all alike.
    contest = auto.Contest({"auto": [1.1, 2.2, 1.1, 2.2], "none": [1.0, 2.0, 1.0, 2.0]})
    assert contest.ratio("none") == pytest.approx((1.1, 1.1, 1.1))
    assert contest.enough(["none"], width=0.01)


def test_a_wide_interval_asks_for_more_rounds() -> None:
    contest = auto.Contest(
        {"auto": [1.0, 1.2, 0.9, 1.0], "none": [1.0] * 4, "onebit": [2.0] * 4},
    )
    fixed = ["none", "onebit"]
    mean, low, high = contest.ratio("none")
    assert contest.best(fixed) == "none"
    assert mean == pytest.approx((1.2 * 0.9) ** 0.25)
    assert low < 1.0 < 1.1 < high
    assert not contest.enough(fixed, width=0.1)
    assert not auto.Contest({n: s[:2] for n, s in contest.seconds.items()}).enough(fixed, 9.0)


def test_luck_is_not_taken_for_speed() -> None:
    """Of two choices as good as Auto, one has the lower median by chance."""
    contest = auto.Contest(
        {"auto": [1.0] * 5, "int8": [0.9, 0.9, 0.9, 1.2, 1.2], "onebit": [1.0] * 5}
    )
    fixed = ["int8", "onebit"]
    assert contest.best(fixed) == "int8"
    assert contest.best(fixed, without=0) == "onebit"  # 0.9, 0.9, 1.2 and 1.2
    # Without one of the slow rounds it is int8, which the slow round then is compared with.
    assert contest.ratio_to_best(fixed)[0] == pytest.approx((1 / 1.2**2) ** 0.2)


def test_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "auto.json"
    arguments = ["--model", "lenet", "--block", "3", "--rounds", "4", "--compression", "onebit"]
    launch.horovodrun(2, "benchmarks.auto", ["--json", str(out), *arguments])
    record = json.loads(out.read_text())
    assert record["schema"] == auto.SCHEMA
    assert set(record["seconds"]) == {"auto", "none", "fp16", "onebit"}
    assert all(len(seconds) == 4 for seconds in record["seconds"].values())
    low, high = record["ratio_to_best"][1:]
    assert low < record["ratio_to_best"][0] < high
    assert record["best"] in ("none", "fp16", "onebit")
    assert 0 < record["planned_after"] <= 400
    assert "decided" in record["explanation"]


def test_powersgd_beside_pytorchs_hook(tmp_path: Path) -> None:
    out = tmp_path / "auto.json"
    arguments = ["--framework", "ddp", "--model", "lenet", "--block", "2", "--rounds", "2"]
    chosen = ["--compression", "powersgd:rank=4", "powersgd-hook"]
    launch.horovodrun(2, "benchmarks.auto", ["--json", str(out), *arguments, *chosen])
    record = json.loads(out.read_text())
    seconds = record["seconds"]
    assert all(t > 0 for own in record["processor_seconds"].values() for t in own)
    assert set(seconds) == {"auto", "none", "fp16", "powersgd:rank=4", "powersgd-hook"}
