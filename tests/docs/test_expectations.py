"""The README's tables of speeds and accuracies hold the records' figures.

They are rendered (tests/docs/test_pages.py); here some of their figures are computed again from the
records' JSON, by formulas of this file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hvd_compress.planner.choices import DEFAULT_CODECS

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "benchmarks" / "records"
README = (ROOT / "README.md").read_text()


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return found


def _table(name: str) -> list[list[str]]:
    """The cells of a table of the README, without its header."""
    text = README.partition(f"<!-- table: expected-{name} -->")[2].partition("<!-- end -->")[0]
    return [line.strip("| ").split(" | ") for line in text.strip().splitlines()[2:]]


def _interval(numbers: Any) -> tuple[float, float, float]:
    mean = float(np.mean(numbers))
    low, high = stats.t.interval(0.95, len(numbers) - 1, mean, stats.sem(numbers))
    return mean, float(low), float(high)


def _numbers(cell: str) -> list[float]:
    return [float(one.replace("\u2212", "-")) for one in re.findall(r"[+\u2212]?\d+\.\d+", cell)]


@pytest.mark.parametrize(
    "link, choice, column",
    [
        ("50mbit", "onebit", 3),
        ("100mbit", "powersgd:rank=4,warmup_steps=2", 4),
        ("100mbit", "int8", 5),
        ("1gbit", "fp16", 6),
    ],
)
def test_a_speed_is_a_mean_over_paired_rounds(link: str, choice: str, column: int) -> None:
    (line,) = (line for line in _table("speed") if line[-1] == f"`lab-ddp-gpt-{link}`")
    seconds = _record(f"lab-ddp-gpt-{link}")["seconds"]
    ratios = np.log(np.array(seconds["none"]) / np.array(seconds[choice]))
    assert _numbers(line[column]) == pytest.approx(np.exp(_interval(ratios)), abs=0.0051)


def test_a_difference_is_paired_by_seed() -> None:
    lines = {line[-1]: line for line in _table("accuracy")}
    rows = {one["compression"]: one["by_seed"] for one in _record("accuracy")["compressions"]}
    found = [rows["onebit"][seed] - rows["none"][seed] for seed in rows["none"]]
    assert _numbers(lines["`accuracy`"][7]) == pytest.approx(_interval(found), abs=0.0051)
    shots: dict[str, dict[int, float]] = {"none": {}, "onebit:exchange=two_shot": {}}
    for row in _record("papers-onebit-feedback")["rows"]:
        if row["compression"] in shots:
            shots[row["compression"]][row["seed"]] = 100 * row["result"]["test_accuracy"]
    none, own = shots.values()
    found = [own[seed] - none[seed] for seed in none]
    cell = lines["`papers-onebit-feedback`"][7]
    assert _numbers(cell) == pytest.approx(_interval(found), abs=0.0051)


def test_every_record_is_there() -> None:
    names = [
        name
        for table in ("speed", "accuracy", "rest")
        for line in _table(table)
        for name in re.findall(r"`(.*?)`", line[-1])
    ]
    assert len(names) > 20
    for name in names:
        assert list(RECORDS.glob(f"{name}.json")), name


def test_auto_chooses_among_codecs_that_no_record_sets_apart_from_uncompressed() -> None:
    trained = [
        one for path in RECORDS.glob("accuracy*.json") for one in _record(path.stem)["compressions"]
    ]
    for codec in DEFAULT_CODECS:
        found = [one for one in trained if one["compression"] == codec]
        assert all(one["low"] <= 0 <= one["high"] for one in found)
        assert codec == "fp16" or len(found) > 5
