"""The frontier: one command, its points, and the committed record."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks.frontier import __main__
from benchmarks.frontier.experiment import EXPERIMENTS, Case, Sent, TaskCase, equal_bits, run
from benchmarks.frontier.points import by_optimizer, points
from benchmarks.frontier.tasks import LENET as TASK
from benchmarks.frontier.tasks import TASKS, TEXT
from benchmarks.papers import record
from benchmarks.papers.models import build
from benchmarks.papers.native import Native
from benchmarks.tables import Table
from hvd_compress.codecs import Int8, NoiseKey
from hvd_compress.codecs.base import as_matrix
from tests.codecs.cases import normal

EXPERIMENT = EXPERIMENTS[TASK.name]
CASES = EXPERIMENT.cases
LENET = [tuple(one.shape) for one in build("lenet", (28, 28, 1), 10).parameters()]
KINDS = (
    *(
        "none",
        "int8",
        "ecq:levels=1,norm=l2,coding=entropy,bucket=4096",
        "topk",
        "ef21-sgdm+topk",
        "signum",
    ),
    "powersgd:rank=1",
)


def row(
    method: str,
    seed: int,
    bits: float,
    accuracy: float | None,
    optimizer: str = "momentum",
    key: str = TASK.measure.key,
) -> dict[str, Any]:
    result = {"bits": bits, key: accuracy}
    return {"method": method, "seed": seed, "optimizer": optimizer, "result": result}


def test_each_kind_of_method_trains_resumes_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases(full: bool) -> list[Case]:
        kept = [one for one in CASES(full) if one.seed < 2 and one.method in KINDS]
        return [dataclasses.replace(one, steps=2) for one in kept]

    small = dataclasses.replace(EXPERIMENT, cases=cases)
    monkeypatch.setitem(EXPERIMENTS, TASK.name, small)
    assert __main__.main(["--out", str(tmp_path)]) == 0
    made = record.read(tmp_path / "frontier.json")
    assert {one["method"] for one in made.rows} == set(KINDS)
    assert "text" in (tmp_path / "frontier.svg").read_text()
    assert all(f"`{method}`" in (tmp_path / "frontier.md").read_text() for method in KINDS)
    capsys.readouterr()

    def never(case: Case, advance: Any) -> dict[str, Any]:
        raise AssertionError("every case was there")

    monkeypatch.setitem(EXPERIMENTS, TASK.name, dataclasses.replace(small, run=never))
    assert __main__.main(["--out", str(tmp_path)]) == 0
    assert record.read(tmp_path / "frontier.json").rows == made.rows
    assert __main__.main(["--out", str(tmp_path), "--data", "digits"]) == 1
    assert "expected cases with data digits, got mnist5k" in capsys.readouterr().err


def test_bits_of_factors_are_those_of_both_and_of_what_travels_uncompressed() -> None:
    outcome = run(Case("powersgd:rank=1", 3, steps=1), lambda: None)
    elements = sum(math.prod(shape) for shape in LENET)
    sent = sum(sum(as_matrix(shape)) if len(shape) > 1 else shape[0] for shape in LENET)
    assert outcome["bits"] == 32 * sent / elements


def test_workers_momentum_is_the_optimizers_where_nothing_is_lost() -> None:
    """EF21 with 16-bit numbers, beside SGD with momentum."""
    plain, ef21 = (
        run(Case(method, 3, steps=4), lambda: None) for method in ("none", "ef21-sgdm+bf16")
    )
    assert 16 < ef21["bits"] < 17
    assert ef21["train_loss"] == pytest.approx(plain["train_loss"], rel=2e-2)


def test_bits_are_those_of_payloads() -> None:
    sent, codec, shape = Sent(), Int8(), (3000,)
    assert sent.bits == 0
    Native(sent).through(codec, shape, normal(shape), NoiseKey())
    assert sent.bits == 8 * codec.payload_bytes(shape) / 3000


@pytest.mark.parametrize("optimizer", TEXT.optimizers)
def test_text_trains_with_each_optimizer(optimizer: str) -> None:
    (rate, _) = TEXT.optimizers[optimizer]
    case = TaskCase("ecq", 1, rate, 20, workers=2, batch=4, data="text", optimizer=optimizer)
    outcome = run(case, lambda: None)
    assert 4 < outcome["bits"] < 4.1
    assert 2 < outcome["test_bits"] < 7


def test_the_frontier_has_no_method_that_another_beats() -> None:
    rows = [
        row(method, seed, bits, None if accuracy is None else accuracy + seed / 100)
        for seed in range(2)
        for method, bits, accuracy in (
            ("none", 32.0, 0.90),
            ("worse", 8.0, 0.80),
            ("good", 4.0, 0.85),
            ("better", 4.0, 0.89),
            ("diverges", 0.1, None),
            ("few", 0.3, 0.50),
        )
    ]
    found = {one.method: one for one in points(rows, TASK.measure)}
    assert list(found) == ["none", "worse", "good", "better", "few", "diverges"]
    assert {name for name, one in found.items() if one.best} == {"none", "better", "few"}
    assert found["diverges"].value is None and found["diverges"].difference is None
    worse = found["worse"].difference
    assert worse is not None and worse.mean == pytest.approx(-10) and worse.half_width < 1e-6
    assert found["good"].value is not None
    assert np.isclose(found["good"].value.mean, 85.5)
    text = EXPERIMENT.table(rows).text()
    assert "−10.00" in text and "diverges" in text


def test_fewer_bits_a_byte_are_better_and_optimizers_are_compared_side_by_side() -> None:
    rows = [
        row(method, seed, bits, loss + seed / 100, optimizer, TEXT.measure.key)
        for optimizer in ("adamw", "muon")
        for seed in range(2)
        for method, bits, loss in (("none", 32.0, 2.9), ("ecq", 4.0, 3.1), ("qsgd", 4.0, 3.0))
        if (optimizer, method) != ("muon", "qsgd")
    ]
    found = points(by_optimizer(rows)["adamw"], TEXT.measure)
    assert {one.method for one in found if one.best} == {"none", "qsgd"}
    lines = equal_bits(TEXT, rows).rows
    assert [line[0] for line in lines] == ["`none`", "`ecq`"]
    assert lines[0][2:] == ["2.905", "2.905"]
    assert all(cell.startswith("+0.200 (") for cell in lines[1][2:])


@pytest.mark.parametrize("task", TASKS)
def test_the_committed_record_is_of_these_cases(task: str) -> None:
    experiment = EXPERIMENTS[task]
    records = Path(benchmarks.__file__).parent / "records"
    made = record.read(records / f"{experiment.name}.json")
    cases = experiment.cases(False)
    assert len(made.rows) == len(cases) and all(made.has(case) for case in cases)
    assert isinstance(experiment.table(made.rows), Table)
