"""TernGrad (Wen et al., 2017), section 3.1: one scale for all workers, and where each of them clips.

The paper's workers clip at their own standard deviation (section 3.3), and then take the largest scale.
This package's integer sums cut off at the shared scale, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.papers.experiment import (
    Advance,
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    percent,
    spread,
    values,
)
from benchmarks.papers.native import Native
from benchmarks.papers.training import DATA, NONE, Compression, Gradients, Recipe, Run, outcome
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import Ternary
from hvd_compress.exchanges.reference import Simulation

LAYERS = "ternary:bucket=tensor"
OWN, SHARED, PUBLISHED = "own scales", "shared, cut at it", "shared, cut at own"
COMPRESSIONS = {
    OWN: LAYERS,
    SHARED: f"{LAYERS},exchange=integer_sum",
    PUBLISHED: f"{LAYERS},clip=none,exchange=integer_sum",
}
_CLIPPING = Ternary("tensor", 2.5)


@dataclass(frozen=True)
class Settings:
    """One training, and the errors on the way.

    Attributes:
        variant: the name in COMPRESSIONS; ``"none"`` is not compressed, and measures all variants'
            errors on the same gradients.
        workers: the number of workers that share the mini-batch.
        seed: the recipe's seed.
        steps: the number of steps.
        batch: the number of images per step.
        data: the recipe's data.
    """

    variant: str
    workers: int
    seed: int
    steps: int = 200
    batch: int = 64
    data: str = DATA


def clipped(gradients: Gradients, step: int = 0) -> Gradients:
    """Each worker's gradients, cut off at 2.5 of its own standard deviations (equation 21)."""
    made = {}
    for name, of_workers in gradients.items():
        rows = of_workers.detach().reshape(len(of_workers), -1).contiguous().numpy()
        limits = np.array([_CLIPPING.norms(row)[0] for row in rows])[:, None]
        made[name] = torch.from_numpy(np.clip(rows, -limits, limits)).reshape(of_workers.shape)
    return made


def cases(full: bool) -> list[Settings]:
    """Two and sixteen workers; ``full`` is longer."""
    seeds, steps = (10, 2000) if full else (3, 200)
    return [
        Settings(variant, workers, seed, steps)
        for seed in range(seeds)
        for workers in (2, 16)
        for variant in (NONE, *COMPRESSIONS)
    ]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Trains once; without compression, the variants' squared errors relative to the mean gradient, too."""
    s = settings
    recipe = Recipe(
        "lenet",
        COMPRESSIONS.get(s.variant, NONE),
        s.seed,
        s.steps,
        s.workers,
        s.batch,
        lr=0.02,
        data=s.data,
    )
    if s.variant != NONE:
        prepare = clipped if s.variant == PUBLISHED else None
        return outcome(recipe, advance, prepare=prepare)
    training = Run(recipe)
    errors = {name: Errors(recipe, name) for name in COMPRESSIONS}

    def each(step: int, loss: float, gradients: Gradients) -> None:
        if step % 5 == 0:
            for one in errors.values():
                one.add(training, gradients)
        advance()

    training.train(each)
    accuracy, _ = training.score()
    _, loss = training.score("train")
    return {
        "test_accuracy": accuracy,
        "train_loss": loss,
        "errors": {name: one.result() for name, one in errors.items()},
    }


class Errors:
    """The distance of a variant's average from the mean gradient.

    Args:
        recipe: the recipe of the training whose gradients are sent.
        variant: the name in COMPRESSIONS.
    """

    def __init__(self, recipe: Recipe, variant: str) -> None:
        self._compression = Compression.parse(COMPRESSIONS[variant])
        self._prepare: Callable[[Gradients], Gradients] | None = None
        if variant == PUBLISHED:
            self._prepare = clipped
        self._workers = recipe.workers
        self._simulation: Simulation | None = None
        self._errors: list[float] = []

    def add(self, training: Run, gradients: Gradients) -> None:
        """Sends one step's gradients."""
        compression = self._compression
        assert compression.codec is not None
        self._simulation = self._simulation or Simulation(
            compression.exchange,
            compression.codec,
            compression.feedback,
            training.shapes,
            self._workers,
            arithmetic=Native(),
        )
        sent = gradients if self._prepare is None else self._prepare(gradients)
        arrays = {name: g.detach().contiguous().numpy() for name, g in sent.items()}
        received = self._simulation.average(
            [{name: array[rank] for name, array in arrays.items()} for rank in range(self._workers)]
        )
        error = total = 0.0
        for name, of_workers in gradients.items():
            mean = of_workers.detach().mean(0).double().numpy()
            error += float(np.square(received[name] - mean).sum())
            total += float(np.square(mean).sum())
        self._errors.append(error / total)

    def result(self) -> float:
        """The mean over the steps."""
        return float(np.mean(self._errors))


def table(rows: list[Row]) -> Table:
    """One line a variant and number of workers."""
    header = (
        "scales",
        "workers",
        "squared error of the average",
        "test accuracy %",
        "training loss",
    )
    lines = []
    for workers in kinds(rows, "workers"):
        plain = choose(rows, variant=NONE, workers=workers)
        for variant in kinds(rows, "variant"):
            own = choose(rows, variant=variant, workers=workers)
            error = "0" if variant == NONE else spread(values(plain, "errors", variant))
            lines.append(
                (
                    variant,
                    str(workers),
                    error,
                    percent(own, "test_accuracy"),
                    spread(values(own, "train_loss"), "{:.3f}"),
                )
            )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """The paper compares nothing here: whether its clipping is better than the integer sum's own."""
    found = []
    for workers in kinds(rows, "workers"):
        plain = choose(rows, variant=NONE, workers=workers)
        errors = {variant: values(plain, "errors", variant) for variant in COMPRESSIONS}
        losses = {
            variant: values(choose(rows, variant=variant, workers=workers), "train_loss")
            for variant in COMPRESSIONS
        }
        found.append(
            Claim(
                f"{workers} workers: to clip at each worker's own deviation makes smaller errors than to "
                "cut off at the shared scale",
                "not compared",
                f"squared error {errors[PUBLISHED].mean():.3g} and {errors[SHARED].mean():.3g}; training "
                f"loss {losses[PUBLISHED].mean():.3g} and {losses[SHARED].mean():.3g}",
                judge(errors[SHARED] - errors[PUBLISHED]),
            )
        )
    return found


EXPERIMENT = Experiment(
    name="terngrad-sharing",
    paper="TernGrad (Wen et al., 2017), section 3.1: scaler sharing",
    cases=cases,
    ticks=lambda settings: settings.steps,
    run=run,
    table=table,
    claims=claims,
)
