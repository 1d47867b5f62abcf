"""What every committed record says of itself: commit, versions, processor, seeds and each one's result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import machine

RECORDS = sorted((Path(benchmarks.__file__).parent / "records").glob("*.json"))
Record = dict[str, Any]

_BEFORE = """
    accuracy accuracy-defaults accuracy-diloco accuracy-exchanges accuracy-fsdp accuracy-hierarchical
    accuracy-tensorflow accuracy-text accuracy-text-keras accuracy-text-momentum accuracy-text-muon
    accuracy-text-onebit-adam accuracy-text-warmup churn codec-cpu codec-cpu-zen5 codec-entropy-zen4
    codec-entropy-zen4-avx2 faults frontends lab-alexnet-1gbit lab-alexnet-1gbit-zen3
    lab-alexnet-1gbit-zen4 lab-alexnet-200mbit lab-auto-2-100mbit lab-auto-2-1gbit lab-auto-2-none
    lab-auto-4-100mbit lab-auto-4-1gbit lab-auto-4-none lab-auto-8-100mbit lab-auto-8-1gbit
    lab-auto-8-none lab-ddp-gpt-100mbit lab-ddp-gpt-1gbit lab-ddp-gpt-200mbit lab-ddp-gpt-500mbit
    lab-ddp-gpt-50mbit lab-ddp-gpt-none lab-diloco-50mbit lab-double-buffering-200mbit
    lab-double-buffering-50mbit lab-exchange-2-1gbit lab-exchange-2-200mbit lab-fsdp-100mbit
    lab-fsdp-500mbit lab-gradients-8 lab-gradients-8-onebit lab-grid-2-200mbit lab-grid-4-200mbit
    lab-text-100mbit lab-text-1gbit long onebit-system overhead-ddp overhead-ddp-zen3 overhead-resnet20
    overhead-resnet20-zen3 overhead-torch overhead-torch-zen3 overhead-transformer papers-ecq-linear
    papers-ecq-real steps-resnet20 steps-resnet20-zen3 train-resnet20-entropy train-text-entropy
"""
BEFORE_COMMITS = set(_BEFORE.split())
"""Made before records had a commit. They are kept, as ``git log -- FILE`` names the commit that each came
with; a record that is made again has to leave this list."""

MEANS = {
    "hvd_compress/accuracy/1": "means over the seeds, and intervals: the trainings were not kept",
    "hvd_compress/codec-cuda/2": "medians over the turns; the numbers that are encoded have a fixed seed",
    "hvd_compress/gpu-check/2": "each part ran once; times are the least of the repetitions",
    "hvd_compress/codec/1": "medians over the turns; the numbers that are encoded have a fixed seed",
    "hvd_compress/frontends/1": "medians over the turns, and deciles",
    "hvd_compress/exchange/1": "medians over the repetitions, and deciles",
    "hvd_compress/gradients/1": "medians over the repetitions, and deciles",
}
"""Schemas whose records summarize their repetitions, and how. New ones of accuracies have each seed."""


def _runs(record: Record) -> list[int]:
    assert all(run["step_seconds"]["median"] > 0 for run in record["runs"])
    return [run["seed"] for run in record["runs"]]


def _rounds(record: Record) -> list[int]:
    rows = record["rows"]
    kept = [row["rounds"] for row in (rows.values() if isinstance(rows, dict) else rows)]
    lengths = {
        len(one) for own in kept for one in (own.values() if isinstance(own, dict) else [own])
    }
    return list(range(min(lengths)))


REPEATED: dict[str, Callable[[Record], list[int]]] = {
    "hvd_compress/train/1": _runs,
    "hvd_compress/papers/1": lambda r: [row["seed"] for row in r["rows"] if row["result"]],
    "hvd_compress/allreduce/1": lambda r: list(
        range(min(len(row["rounds"]) for cell in r["cells"] for row in cell["rows"].values()))
    ),
    "hvd_compress/auto/2": lambda r: list(range(min(map(len, r["seconds"].values())))),
    "hvd_compress/double-buffering/1": _rounds,
    "hvd_compress/grid/1": _rounds,
    "hvd_compress/overhead/1": _rounds,
    "hvd_compress/overhead/2": _rounds,
    "hvd_compress/steps/1": _rounds,
    "hvd_compress churn 1": lambda r: [r["seed"]] * len(r["jobs"]),
    "hvd_compress faults 1": lambda r: [len(case["endings"]) for case in r["cases"]],
}
"""The seeds of the results that a record holds one by one, or the numbers of its rounds, by schema."""


def read(path: Path) -> Record:
    found: Record = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_it_is_of(path: Path) -> None:
    record = read(path)
    assert record["machine"]["cpu"] and record["machine"]["cores"] >= 1
    assert {"python", "hvd_compress", "numpy"} <= set(record["versions"])
    here = record["machine"].get("commit", record["machine"].get("resumed_on", "unknown"))
    assert (here == "unknown") == (path.stem in BEFORE_COMMITS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_holds_each_seeds_result(path: Path) -> None:
    record = read(path)
    if record["schema"] in MEANS:
        new = record["schema"] == "hvd_compress/accuracy/1" and path.stem not in BEFORE_COMMITS
        assert not new or all(len(one["by_seed"]) == one["seeds"] for one in record["compressions"])
    else:
        assert REPEATED[record["schema"]](record)


def test_the_lists_name_records_that_are_there() -> None:
    assert {path.stem for path in RECORDS} >= BEFORE_COMMITS
    assert {read(path)["schema"] for path in RECORDS} == MEANS.keys() | REPEATED.keys()


def test_the_commit_of_a_new_record() -> None:
    """Twelve digits; or, where the code is no working tree of Git's, unknown."""
    found = machine.description()["commit"]
    digits = str(found).removesuffix("-dirty")
    assert found == "unknown" or (len(digits) == 12 and int(digits, 16))
