"""All tables of measurements in docs/ by their names there, and all pictures by their files' names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import compare, plots, results
from benchmarks.allreduce import drawing
from benchmarks.frontier.experiment import EXPERIMENTS as FRONTIERS
from benchmarks.frontier.experiment import equal_bits
from benchmarks.frontier.points import by_optimizer
from benchmarks.frontier.tasks import MOMENTUM, TEXT
from benchmarks.pages import (
    accuracy,
    bandwidth,
    codec,
    expectations,
    gpu,
    lab,
    papers,
    reading,
    step_times,
    support,
    time_to_loss,
)
from benchmarks.pages.reading import RECORDS
from benchmarks.papers import record
from benchmarks.papers.experiment import Row
from benchmarks.papers.registry import EXPERIMENTS
from benchmarks.tables import Table
from benchmarks.trained import record as trained

_ADAMW = (
    *("none", "int8", "ecq:bucket=4096,alpha=0.01", "qsgd:bucket=512", "onebit"),
    *("onebit:warmup_steps=100", "onebit:warmup_steps=200"),
)
_ONCE = (
    *(
        "none",
        "int8",
        "ecq:bucket=4096,alpha=0.01",
        "ecq:levels=4,norm=l2,bucket=4096",
        "qsgd:bucket=4096",
        "qsgd:levels=4,norm=l2,bucket=4096",
    ),
    *("qsgd:bucket=512", "onebit"),
)
_RESIDUALS = (
    *("ecq:bucket=4096,alpha=0.01", "ecq:residual_dtype=bfloat16,bucket=4096,alpha=0.01"),
    *("onebit:warmup_steps=100", "onebit:warmup_steps=100,residual_dtype=bfloat16"),
)

_ALONE = ("accuracy-diloco", "local")
_MOMENTUM = "outer_lr=0.7,outer_momentum=0.9"
_EVERY_TEN = "none:sync_every=10,outer_lr=1.0,outer_momentum=0.0"


def _allreduce(name: str = "lab-allreduce") -> drawing.Cells:
    cells: drawing.Cells = reading.record(name)["cells"]
    return cells


def _trained() -> trained.Record:
    return trained.read(RECORDS / "trained.json")


def _frontier(task: str) -> list[Row]:
    return record.read(RECORDS / f"{FRONTIERS[task].name}.json").rows


def _frontier_table(task: str, optimizer: str = MOMENTUM) -> Table:
    return FRONTIERS[task].table(by_optimizer(_frontier(task))[optimizer])


def _draw_frontier(task: str, path: Path) -> None:
    draw = FRONTIERS[task].draw
    assert draw is not None
    draw(_frontier(task), path)


TABLES: dict[str, Callable[[], Table]] = {
    "papers": papers.summary,
    **{f"papers-{name}": partial(papers.results, name) for name in EXPERIMENTS},
    **{f"statements-{name}": partial(papers.statements, name) for name in EXPERIMENTS},
    "expected-speed": expectations.speed,
    "expected-accuracy": expectations.accuracy,
    "expected-rest": expectations.rest,
    "onebit-losses": expectations.onebit,
    "support": support.matrix,
    "accuracy": partial(accuracy.differences, "accuracy"),
    "accuracy-tensorflow": partial(accuracy.differences, "accuracy-tensorflow"),
    "accuracy-exchanges": partial(accuracy.differences, "accuracy-exchanges"),
    "accuracy-four-ranks": partial(accuracy.differences, "accuracy-four-ranks"),
    "accuracy-text-four-ranks": partial(accuracy.differences, "accuracy-text-four-ranks"),
    "accuracy-hierarchical": partial(accuracy.differences, "accuracy-hierarchical"),
    "accuracy-text": partial(accuracy.differences, ("accuracy-text", _ONCE)),
    "trained": lambda: trained.table(_trained()),
    "accuracy-residuals": partial(accuracy.differences, ("accuracy-text", _RESIDUALS)),
    "accuracy-text-keras": partial(accuracy.differences, "accuracy-text-keras"),
    "accuracy-adamw": partial(accuracy.differences, ("accuracy-text", _ADAMW)),
    "accuracy-onebit-adam": partial(accuracy.differences, "accuracy-text-onebit-adam"),
    "accuracy-momentum": partial(accuracy.differences, "accuracy-text-momentum"),
    "accuracy-muon": partial(
        accuracy.differences,
        "accuracy-text-muon",
        (
            "accuracy-text-muon-4bit",
            (
                "ecq:rotate=True,bucket=128,alpha=0.01",
                "ecq:rotate=True,bucket=128,alpha=0.8",
                "ecq:rotate=True,bucket=64,alpha=0.8",
            ),
        ),
    ),
    "accuracy-fsdp": partial(accuracy.differences, "accuracy-fsdp"),
    "accuracy-fsdp-gathers": partial(accuracy.differences, "accuracy-fsdp-gathers"),
    "accuracy-diloco": partial(
        accuracy.differences,
        "accuracy-diloco",
        ("accuracy-diloco-sparse", (_EVERY_TEN, "stock")),
        baseline=_ALONE,
    ),
    "accuracy-diloco-momentum": partial(
        accuracy.differences,
        "accuracy-diloco-momentum",
        ("accuracy-diloco-sparse", (f"none:sync_every=10,{_MOMENTUM}",)),
        (_ALONE[0], (_ALONE[1],)),
        baseline=_ALONE,
    ),
    "accuracy-diloco-sparse": partial(
        accuracy.differences,
        (
            "accuracy-diloco-sparse",
            (
                *("stock", _EVERY_TEN),
                "topk:sync_every=10,alpha=0.95,beta=0.95,outer_lr=1.0,outer_momentum=0.0",
                f"topk:sync_every=10,{_MOMENTUM}",
            ),
        ),
        (_ALONE[0], (_ALONE[1],)),
        baseline=_ALONE,
    ),
    "accuracy-diloco-onebit": partial(
        accuracy.differences,
        "accuracy-diloco-onebit",
        (_ALONE[0], (_ALONE[1],)),
        baseline=_ALONE,
    ),
    "accuracy-ecq": partial(
        accuracy.differences,
        (
            "accuracy-text",
            (
                "ecq:bucket=4096,alpha=0.01",
                "ecq:levels=4,norm=l2,bucket=4096",
                "qsgd:bucket=4096",
                "qsgd:levels=4,norm=l2,bucket=4096",
                "qsgd:bucket=512",
            ),
        ),
    ),
    "frontier": partial(_frontier_table, "lenet"),
    "frontier-resnet20": partial(_frontier_table, "resnet20"),
    "frontier-adamw": partial(_frontier_table, "text", "adamw"),
    "equal-bits": lambda: equal_bits(TEXT, _frontier("text")),
    "compare": lambda: compare.table(reading.record("compare")),
    "bandwidth": bandwidth.table,
    "alexnet": step_times.table,
    "auto": lab.auto,
    "powersgd": lab.powersgd,
    "text": lab.text,
    "time-to-loss": time_to_loss.table,
    "gpt2": lab.large,
    "gradients": lab.gradients,
    "allreduce-near": lambda: drawing.table(_allreduce(), "none"),
    "allreduce-eight": lambda: drawing.table(_allreduce("lab-allreduce-eight"), "none"),
    "allreduce-large": lambda: drawing.table(_allreduce("lab-allreduce-large"), "none"),
    "allreduce-far": lambda: drawing.table(_allreduce(), "40ms"),
    "allreduce-eight-far": lambda: drawing.table(_allreduce("lab-allreduce-eight-far"), "40ms"),
    "allreduce-kept-windows": lambda: drawing.table(
        _allreduce("lab-allreduce-kept-windows"), "40ms"
    ),
    "allreduce-costs": lambda: drawing.costs(_allreduce()),
    "reduce-scatter": lab.reduce_scatter,
    "all-gather": lab.all_gather,
    "diloco": lab.diloco,
    "double-buffering": lab.double_buffering,
    "grid-2": partial(lab.grid, 2),
    "grid-4": partial(lab.grid, 4),
    "overhead": lab.overhead,
    "models": lab.models,
    "churn": lab.churn,
    "codecs": codec.two_cores,
    "codecs-gpu": gpu.codecs,
    "gpu-checks": gpu.checks,
    "gpu-launches": gpu.launches,
    "codecs-entropy": codec.entropy,
    "int8-errors": codec.int8_errors,
    "ecq-normal": codec.normal,
    "ecq-noise": codec.noise,
    "ecq-text-bytes": codec.text_bytes,
}


def _text_loss(path: Path) -> None:
    names = ("lab-text-100mbit", "lab-text-1gbit")
    plots.text_loss([results.read(RECORDS / f"{name}.json") for name in names], path)


def _ecq_linear(path: Path) -> None:
    draw = EXPERIMENTS["ecq-linear"].draw
    assert draw is not None
    draw(papers.rows("ecq-linear"), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "step_times.svg": step_times.draw,
    "bandwidth.svg": bandwidth.draw,
    "text_loss.svg": _text_loss,
    "papers-ecq-linear.svg": _ecq_linear,
    "time_to_loss.svg": time_to_loss.draw,
    "trained.svg": lambda path: trained.draw(_trained(), path),
    "allreduce.svg": lambda path: drawing.draw(_allreduce(), path),
    **{f"{one.name}.svg": partial(_draw_frontier, task) for task, one in FRONTIERS.items()},
}
