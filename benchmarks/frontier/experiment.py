"""Trains with every codec and setting, and other methods, on one recipe; measures accuracy and bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.frontier.drawing import draw
from benchmarks.frontier.points import Point, points
from benchmarks.pages.reading import signed
from benchmarks.papers.experiment import Advance, Experiment, Row
from benchmarks.papers.training import DATA, NONE, Recipe, Run
from benchmarks.rivals import signum
from benchmarks.rivals.ef21 import EF21, Estimate
from benchmarks.rivals.momentum import Momentum
from benchmarks.tables import Table
from hvd_compress.codecs import Codec, NoiseKey, payload_length

SIGNUM, SIGNUM_32, SGDM = "signum", "signum-32", "ef21-sgdm+"
METHODS = (
    NONE,
    "bf16",
    "int8",
    *("ecq:levels=15", "ecq", "ecq:coding=entropy", "ecq:levels=2,coding=entropy"),
    *("ecq:levels=4,norm=l2,coding=entropy", "ecq:levels=1,norm=l2,coding=entropy"),
    *("qsgd", "qsgd:levels=4,norm=l2,coding=entropy", "qsgd:levels=1,norm=l2,coding=entropy"),
    *("ternary", "ternary:coding=entropy"),
    *("onebit", "onebit:group=column", "onebit:group=tensor", "onebit:alpha=0"),
    *("topk:keep=512,bits=4", "topk:keep=256", "topk", "topk:keep=16"),
    *(f"{SGDM}onebit", f"{SGDM}topk:keep=256", f"{SGDM}topk"),
    *(SIGNUM, SIGNUM_32),
    *("powersgd:rank=4", "powersgd:rank=1"),
)
"""The methods: codecs with settings; after ``ef21-sgdm+``, codecs in EF21 with momentum, which replaces
error feedback; Signum with majority vote; the signs of the workers' average momentum, for which 32 bits are
sent."""
RATE, SIGNUM_RATE = 0.02, 0.002
"""The learning rates, chosen on seed 100 in trainings of 300 and 400 steps: the first without compression,
among 0.01, 0.02, 0.05 and 0.1; the second among 0.0002, 0.0005, 0.001, 0.002 and 0.004, the last of which
was as good."""


@dataclass(frozen=True)
class Case:
    """A training of LeNet by SGD with momentum of 0.9, and a learning rate that falls linearly to zero.

    Attributes:
        method: one of METHODS.
        seed: the seed of the recipe.
        rate: the learning rate at the start. Signum has its own, because the length of its steps is fixed.
        steps: the number of steps.
        workers: the number of workers that share the mini-batch; odd, so that votes are seldom tied.
        batch: the number of images per step, of all workers together.
        data: the data of the recipe.
    """

    method: str
    seed: int
    rate: float = RATE
    steps: int = 200
    workers: int = 5
    batch: int = 80
    data: str = DATA


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


def cases(full: bool) -> list[Case]:
    """All methods with five seeds; with ``full``, for the steps of 20 epochs of MNIST's 60,000 images."""
    return [
        Case(
            method,
            seed,
            SIGNUM_RATE if method.startswith(SIGNUM) else RATE,
            15_000 if full else 200,
        )
        for seed in range(5)
        for method in METHODS
    ]


def run(case: Case, advance: Advance) -> dict[str, Any]:
    """Trains once; returns the accuracy, the losses and the bits per element."""
    at_workers = case.method.startswith((SIGNUM, SGDM))
    recipe = Recipe(
        "lenet",
        NONE if case.method == SIGNUM_32 else case.method.removeprefix(SGDM),
        case.seed,
        case.steps,
        case.workers,
        case.batch,
        # Without compression, momentum at the workers equals momentum after the average.
        "sgd" if at_workers else "momentum",
        case.rate,
        decay=1.0,
        data=case.data,
    )
    sent = Sent()
    training = _training(case, recipe, sent)
    training.train(lambda step, loss, gradients: advance())
    elements = sum(map(math.prod, training.shapes.values()))
    bits = sent.bits or 8 * training.payload_bytes() / elements  # Factors are no payloads.
    return {**training.scores(), "bits": bits}


def _training(case: Case, recipe: Recipe, sent: Sent) -> Run:
    if case.method == SIGNUM:
        voted = replace(recipe, compression=signum.SENT)
        return Run(voted, signum.Signs(), signum.vote(case.seed), watch=sent)
    if case.method == SIGNUM_32:
        return Run(recipe, Momentum(), receive=signum.signs_of_average)
    if case.method.startswith(SGDM):
        return Run(recipe, Momentum(), feedback=EF21(), receive=Estimate(), watch=sent)
    return Run(recipe, watch=sent)


def table(rows: list[Row]) -> Table:
    """A table with one line for each method, from the most bits to the fewest."""
    header = (
        "method",
        "bits an element",
        "test accuracy %",
        "difference",
        "95% interval",
        "on the frontier",
    )
    return Table(header, [_line(one) for one in points(rows)])


def _line(one: Point) -> list[str]:
    cells = [f"`{one.method}`", f"{one.bits:.2f}"]
    if one.accuracy is None or one.difference is None:
        return [*cells, "diverges", "", "", ""]
    accuracy = f"{one.accuracy.mean:.2f}"
    best = "yes" if one.best else ""
    if one.method == NONE:
        return [*cells, accuracy, "", "", best]
    ends = " to ".join(signed(end, 2) for end in (one.difference.low, one.difference.high))
    return [*cells, accuracy, signed(one.difference.mean, 2), ends, best]


EXPERIMENT = Experiment(
    name="frontier",
    paper="accuracy against bits of an element",
    cases=cases,
    ticks=lambda case: case.steps,
    run=run,
    table=table,
    claims=lambda rows: [],
    draw=draw,
)
