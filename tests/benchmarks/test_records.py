"""Every committed record names its commit, versions, processor, seeds and the result of each seed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import benchmarks
from benchmarks import machine

RECORDS = sorted((Path(benchmarks.__file__).parent / "records").glob("*.json"))
Record = dict[str, Any]

COMMITS_BEGIN = "c89bc96a41a3"
"""The commit since which benchmarks write down their own. An older record has ``recorded_in`` instead: the
commit in which its figures first stood in the repository, which is not said to be the code that ran. The
reasons why such records were not made again are in ``docs/performance.md``, "What a record holds"."""

LATER = {"faults"}
"""Cases were added to an older record after that commit."""

MEANS = {
    "hvd_compress/codec-cuda/2": "medians over the turns; the numbers that are encoded have a fixed seed",
    "hvd_compress/support/1": "each test ran once; the record counts their outcomes",
    "hvd_compress/gpu-check/2": "each part ran once; times are the least of the repetitions",
    "hvd_compress/codec/1": "medians over the turns; the numbers that are encoded have a fixed seed",
    "hvd_compress/frontends/1": "medians over the turns, and deciles",
    "hvd_compress/exchange/1": "medians over the repetitions, and deciles",
    "hvd_compress/gradients/1": "medians over the repetitions, and deciles",
}
"""Schemas whose records summarize their repetitions, and how."""


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


def _seeds(record: Record) -> list[int]:
    seeds = max((list(map(int, one["by_seed"])) for one in record["compressions"]), key=len)
    for one in record["compressions"]:
        mean = one.get("test_bits", one.get("test_accuracy"))
        assert fmean(one["by_seed"].values()) == pytest.approx(mean)
        assert one["seeds"] == len(one["by_seed"]) and set(map(int, one["by_seed"])) <= set(seeds)
    return seeds


REPEATED: dict[str, Callable[[Record], list[int]]] = {
    "hvd_compress/accuracy/1": _seeds,
    "hvd_compress/compare/1": lambda r: min(map(_seeds, r["recipes"].values()), key=len),
    "hvd_compress/train/1": _runs,
    "hvd_compress/trained/1": lambda r: [run["seed"] for run in r["runs"] if run["result"]],
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


def git(*arguments: str) -> str:
    """Returns what Git prints for this checkout; skips the test where the history is not there."""
    command = ("git", "-c", "safe.directory=*", "-C", str(RECORDS[0].parent), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs Git and the whole history")


def figures(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in ("machine", "versions")}


def in_full(record: str) -> str:
    """Names the bucket and the feedback that were the defaults of ECQ and QSGD when a record was made."""

    def named(found: re.Match[str]) -> str:
        given = found[2].split(",") if found[2] else []
        names = {one.partition("=")[0] for one in given}
        given += ["bucket=4096"] if "bucket" not in names else []
        plain = found[1] == "ecq" and "alpha" not in names and "norm=l2" not in given
        return f'"{found[1]}:{",".join([*given, *(["alpha=0.01"] if plain else [])])}"'

    return re.sub(r'"(ecq|qsgd)(?::([^" ]*))?"', named, record)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_what_it_is_of(path: Path) -> None:
    record = read(path)
    assert record["machine"]["cpu"] and record["machine"]["cores"] >= 1
    assert {"python", "hvd_compress", "numpy"} <= set(record["versions"])
    commit = record["machine"].get("commit", "unknown")
    assert commit != "unknown" or len(record["machine"]["recorded_in"]) == 12


@pytest.mark.parametrize(
    "path",
    [path for path in RECORDS if "recorded_in" in read(path)["machine"]],
    ids=lambda path: path.stem,
)
def test_an_older_record_is_as_it_was_recorded(path: Path) -> None:
    record = read(path)
    then = record["machine"]["recorded_in"]
    git("cat-file", "-e", COMMITS_BEGIN)
    if "commit" not in record["machine"] and path.stem not in LATER:
        assert not git("rev-list", "--max-count=1", then, f"^{COMMITS_BEGIN}"), "it has a commit"
    # Records of a second processor have had the name of the first one's.
    names = git("ls-tree", "--name-only", then, "./").split()
    same = [name for name in names if name.startswith(path.stem.removesuffix("-zen3"))]
    found = [json.loads(in_full(git("show", f"{then}:./{name}"))) for name in same]
    assert figures(json.loads(in_full(path.read_text()))) in map(figures, found)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_holds_each_seeds_result(path: Path) -> None:
    record = read(path)
    if record["schema"] not in MEANS:
        assert REPEATED[record["schema"]](record)


def test_the_lists_name_records_that_are_there() -> None:
    assert {path.stem for path in RECORDS} >= LATER
    assert {read(path)["schema"] for path in RECORDS} == MEANS.keys() | REPEATED.keys()


def test_the_commit_of_a_new_record() -> None:
    """Twelve digits; or, where the code is no working tree of Git's, unknown."""
    found = machine.description()["commit"]
    digits = str(found).removesuffix("-dirty")
    assert found == "unknown" or (len(digits) == 12 and int(digits, 16))
