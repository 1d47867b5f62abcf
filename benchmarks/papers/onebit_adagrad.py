"""1-bit SGD (Seide et al., 2014), table 3: AdaGrad before and after quantization, in kind."""

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
from benchmarks.papers.training import DATA, NONE, Gradients, Recipe, outcome
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.engine.owner_steps import AdaGrad

SMOOTHED, RAW, PARTIAL, AGGREGATE = (
    "momentum-smoothed gradient",
    "raw gradient",
    "partial gradients",
    "aggregate gradient",
)
PUBLISHED = {
    SMOOTHED: (16.5, 57.4),
    RAW: (16.2, 58.2),
    PARTIAL: (16.1, 57.4),
    AGGREGATE: (15.8, 59.1),
}
"""Word error rates and frame accuracies of training in per cent."""
_QUANTIZED = "onebit:group=column,exchange=two_shot"
_MOMENTUM = 0.9
OVER_TIME, RECENT = "over time", "recent samples"
_RULES = {OVER_TIME: (1.0, 0.002), RECENT: (0.95, 0.0002)}
"""The fraction that each rule's sum keeps in a step, and the learning rate. A sum over time grows, so that
its steps get shorter; a mean over recent samples does not, and has about the step of the other in the
middle of the 200: the root of 100 is 10."""


@dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        place: the place of AdaGrad.
        rule: the rule by which its divisor sums squares.
        seed: the recipe's seed.
        steps: the number of steps.
        rate: the learning rate of AdaGrad's steps, which momentum makes ten times as long.
        data: the recipe's data.
    """

    place: str
    rule: str
    seed: int
    steps: int = 200
    rate: float = 0.002
    data: str = DATA


def cases(full: bool) -> list[Settings]:
    """``full`` is longer."""
    steps, seeds = (2000, 10) if full else (200, 8)
    return [
        Settings(place, rule, seed, steps, rate)
        for seed in range(seeds)
        for rule, (_, rate) in _RULES.items()
        for place in PUBLISHED
    ]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Trains once: one worker with floating gradients, or four with 1-bit ones, quantized twice."""
    quantized = settings.place in (PARTIAL, AGGREGATE)
    smoothed = settings.place == SMOOTHED
    recipe = Recipe(
        "sigmoid",
        _QUANTIZED if quantized else NONE,
        settings.seed,
        settings.steps,
        workers=4 if quantized else 1,
        optimizer="sgd" if smoothed else "momentum",
        # Where momentum comes before, its sums are normalised, too.
        lr=settings.rate / (1 - _MOMENTUM) if smoothed else settings.rate,
        data=settings.data,
    )
    decay, _ = _RULES[settings.rule]
    step = AdaGrad(decay=decay, momentum=_MOMENTUM if smoothed else 0.0)
    if settings.place == AGGREGATE:
        return outcome(recipe, advance, owner_step=on_arrays(step))
    return outcome(recipe, advance, prepare=Before(step))


class Before:
    """AdaGrad on each worker's own gradients.

    Args:
        step: AdaGrad.
    """

    def __init__(self, step: AdaGrad) -> None:
        self._step = step
        self._states: dict[str, dict[str, Any]] = {}

    def __call__(self, gradients: Gradients, step: int) -> Gradients:
        """The steps, by parameter."""
        made = {}
        for name, of_workers in gradients.items():
            g = of_workers.detach().clone()
            self._step(g, self._states.setdefault(name, {}))
            made[name] = g
        return made


def on_arrays(step: AdaGrad) -> Callable[[np.ndarray, dict[str, Any]], None]:
    """The same for an average that is an array."""

    def on_array(aggregate: np.ndarray, state: dict[str, Any]) -> None:
        step(torch.from_numpy(aggregate), state)

    return on_array


def table(rows: list[Row]) -> Table:
    """In the paper's order."""
    header = (
        "AdaGrad applied to",
        "deviation",
        "test accuracy %",
        "training accuracy %",
        "training loss",
        "published frame accuracy %",
    )
    lines = []
    for place, rule in ((p, r) for p in kinds(rows, "place") for r in kinds(rows, "rule")):
        own = choose(rows, place=place, rule=rule)
        lines.append(
            (
                place,
                rule,
                percent(own, "test_accuracy"),
                percent(own, "train_accuracy"),
                spread(values(own, "train_loss")),
                f"{PUBLISHED[place][1]:g}",
            )
        )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """By the training loss, with either rule: training accuracies are all but 100%."""
    losses = {
        (place, rule): values(choose(rows, place=place, rule=rule), "train_loss")
        for place in PUBLISHED
        for rule in _RULES
    }
    pairs = (
        ("AdaGrad is better before momentum than after it", RAW, SMOOTHED),
        ("AdaGrad is better on the aggregate than on the nodes' own gradients", AGGREGATE, PARTIAL),
        ("quantization benefits AdaGrad: better than without", AGGREGATE, RAW),
    )
    return [
        Claim(
            f"{rule}: {text}",
            f"frame accuracy {PUBLISHED[better][1]}% against {PUBLISHED[worse][1]}%",
            f"training loss {losses[better, rule].mean():.3g} against "
            f"{losses[worse, rule].mean():.3g}",
            judge(losses[worse, rule] - losses[better, rule]),
        )
        for rule in _RULES
        for text, better, worse in pairs
    ]


EXPERIMENT = Experiment(
    name="onebit-adagrad",
    paper="1-bit SGD (Seide et al., 2014), table 3: where AdaGrad stands, in kind",
    cases=cases,
    ticks=lambda settings: settings.steps,
    run=run,
    table=table,
    claims=claims,
)
