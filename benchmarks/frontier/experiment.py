"""Trains with every codec and setting, and other methods, on one recipe; measures accuracy and bits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.frontier.drawing import draw
from benchmarks.frontier.points import Point, by_optimizer, points
from benchmarks.frontier.tasks import (
    LENET,
    MOMENTUM,
    SGDM,
    SIGNUM,
    SIGNUM_32,
    SIGNUM_RATE,
    TASKS,
    TEXT,
    Task,
)
from benchmarks.pages.reading import signed
from benchmarks.papers.experiment import Advance, Experiment, Row
from benchmarks.papers.training import DATA, NONE, Recipe, Run
from benchmarks.rivals import signum
from benchmarks.rivals.ef21 import EF21, Estimate
from benchmarks.rivals.momentum import Momentum
from benchmarks.tables import Table
from hvd_compress.codecs import Codec, NoiseKey, payload_length

_WINDOWS = 2048
"""The windows of test text that are scored, of 64 bytes each."""


@dataclass(frozen=True)
class Case:
    """One training, whose learning rate falls linearly to zero.

    Attributes:
        method: one of the methods of :mod:`benchmarks.frontier.tasks`.
        seed: the seed of the recipe.
        rate: the learning rate at the start, or after the warm-up.
        steps: the number of steps.
        workers: the number of workers that share the mini-batch.
        batch: the number of images, or of windows of text, per step, of all workers together.
        data: the data of the recipe.
    """

    method: str
    seed: int
    rate: float = 0.02
    steps: int = 200
    workers: int = 5
    batch: int = 80
    data: str = DATA

    @property
    def task(self) -> str:
        """The name of the task."""
        return LENET.name

    @property
    def optimizer(self) -> str:
        """The optimizer of the recipe."""
        return MOMENTUM


@dataclass(frozen=True)
class TaskCase(Case):
    """A case of another task than LeNet.

    Attributes:
        task: the name of the task.
        optimizer: the optimizer of the recipe.
    """

    task: str = TEXT.name
    optimizer: str = MOMENTUM


class Sent:
    """A counter of encoded bits, as :class:`benchmarks.papers.native.Native` watches payloads."""

    def __init__(self) -> None:
        self._bytes = self._elements = 0

    def __call__(
        self, codec: Codec, shape: tuple[int, ...], noise: NoiseKey, payload: np.ndarray
    ) -> None:
        """Counts one payload."""
        self._bytes += payload_length(payload, payload.size)
        self._elements += codec.layout(shape).count

    @property
    def bits(self) -> float:
        """The bits per element, with headers, scales and padding; 0 without payloads."""
        return 8 * self._bytes / self._elements if self._elements else 0.0


def cases(task: Task, full: bool) -> list[Case]:
    """All methods with all seeds; with ``full``, trainings ten and more times as long."""
    made = []
    for seed in range(task.seeds):
        for optimizer, (rate, methods) in task.optimizers.items():
            for method in methods:
                case = Case(
                    method,
                    seed,
                    SIGNUM_RATE if method.startswith(SIGNUM) else rate,
                    task.steps[full],
                    task.workers,
                    task.batch,
                    task.data,
                )
                if task is not LENET:
                    case = TaskCase(**asdict(case), task=task.name, optimizer=optimizer)
                made.append(case)
    return made


def run(case: Case, advance: Advance) -> dict[str, Any]:
    """Trains once; returns the accuracy, the losses and the bits per element."""
    task = TASKS[case.task]
    at_workers = case.method.startswith((SIGNUM, SGDM))
    recipe = Recipe(
        task.model,
        NONE if case.method == SIGNUM_32 else case.method.removeprefix(SGDM),
        case.seed,
        case.steps,
        case.workers,
        case.batch,
        # Without compression, momentum at the workers equals momentum after the average.
        "sgd" if at_workers else case.optimizer,
        case.rate,
        decay=1.0,
        weight_decay=0.0 if case.optimizer == MOMENTUM else task.weight_decay,
        data=case.data,
    )
    sent = Sent()
    training = _training(case, recipe, sent)
    training.train(lambda step, loss, gradients: advance())
    elements = sum(map(math.prod, training.compressed.values()))
    bits = sent.bits or 8 * training.payload_bytes() / elements  # Factors are no payloads.
    return {**_scores(training, task), "bits": bits}


def _scores(training: Run, task: Task) -> dict[str, Any]:
    if task.model != "gpt":
        return training.scores()
    accuracy, loss = training.score(most=_WINDOWS)
    finite = math.isfinite(loss)
    return {
        "test_accuracy": accuracy if finite else None,
        "test_bits": loss / math.log(2) if finite else None,
        "diverged": not finite,
    }


def _training(case: Case, recipe: Recipe, sent: Sent) -> Run:
    if case.method == SIGNUM:
        voted = replace(recipe, compression=signum.SENT)
        return Run(voted, signum.Signs(), signum.vote(case.seed), watch=sent)
    if case.method == SIGNUM_32:
        return Run(recipe, Momentum(), receive=signum.signs_of_average)
    if case.method.startswith(SGDM):
        return Run(recipe, Momentum(), feedback=EF21(), receive=Estimate(), watch=sent)
    task = TASKS[case.task]
    return Run(recipe, watch=sent, warmup=task.warmup, threshold=task.threshold)


def table(task: Task, rows: list[Row]) -> Table:
    """A table with one line for each method, by optimizer, from the most bits to the fewest."""
    optimizers = by_optimizer(rows)
    several = len(optimizers) > 1
    header = (
        *(["optimizer"] if several else []),
        "method",
        "bits an element",
        task.measure.unit.replace(",", ""),
        "difference",
        "95% interval",
        "on the frontier",
    )
    return Table(
        header,
        [
            [*([optimizer] if several else []), *_line(one, task)]
            for optimizer, own in optimizers.items()
            for one in points(own, task.measure)
        ],
        left=1 + several,
    )


def equal_bits(task: Task, rows: list[Row]) -> Table:
    """A table of differences to uncompressed runs: a line for each method, a column for each optimizer."""
    found = {
        optimizer: {one.method: one for one in points(own, task.measure)}
        for optimizer, own in by_optimizer(rows).items()
    }
    shared = [
        one
        for one in next(iter(found.values())).values()
        if all(one.method in of_optimizer for of_optimizer in found.values())
    ]
    lines = []
    for one in shared:
        cells = []
        for of_optimizer in found.values():
            own = of_optimizer[one.method]
            if own.value is None:
                cells.append("diverges")
            elif one.method == NONE:
                cells.append(f"{own.value.mean:.{task.measure.digits}f}")
            else:
                cells.append(" ".join(_difference(own, task)))
        lines.append([f"`{one.method}`", f"{one.bits:.2f}", *cells])
    return Table(("method", "bits an element", *found), lines)


def _line(one: Point, task: Task) -> list[str]:
    cells = [f"`{one.method}`", f"{one.bits:.2f}"]
    if one.value is None or one.difference is None:
        return [*cells, "diverges", "", "", ""]
    value = f"{one.value.mean:.{task.measure.digits}f}"
    best = "yes" if one.best else ""
    if one.method == NONE:
        return [*cells, value, "", "", best]
    difference, interval = _difference(one, task)
    return [*cells, value, difference, interval.strip("()"), best]


def _difference(one: Point, task: Task) -> tuple[str, str]:
    """The mean difference, and its interval in brackets."""
    assert one.difference is not None
    mean, low, high = (
        signed(number, task.measure.digits)
        for number in (one.difference.mean, one.difference.low, one.difference.high)
    )
    return mean, f"({low} to {high})"


def _experiment(task: Task) -> Experiment:
    return Experiment(
        name="frontier" if task.name == "lenet" else f"frontier-{task.name}",
        paper=f"accuracy against bits of an element, {task.name}",
        cases=partial(cases, task),
        ticks=lambda case: case.steps,
        run=run,
        table=partial(table, task),
        claims=lambda rows: [],
        draw=partial(draw, task.measure),
    )


EXPERIMENTS = {name: _experiment(task) for name, task in TASKS.items()}
