"""ECQ-SGD (Wu et al., 2018), section 6.2: the bits of ResNet-20's gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers.entropy import Histogram
from benchmarks.papers.experiment import Advance, Claim, Experiment, Row, percent, spread, values
from benchmarks.papers.native import Native
from benchmarks.papers.small_buckets import Reference, SmallTernary
from benchmarks.papers.training import DATA, NONE, Compression, Gradients, Recipe, Run
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.exchanges.reference import Simulation

QSGD = "qsgd:levels=4,norm=linf,bucket=512"
ECQ_SGD = "ecq:levels=4,norm=l2,bucket=4096,alpha=0.01,beta=1.0"
CODED = ECQ_SGD + ",coding=entropy"
WHOLE = CODED + " (one tensor)"
"""All gradients, one behind the other, are encoded as one tensor, as the paper's buckets cut them."""

THREES = "onebit:group=row (rows of 3)"
"""1-bit SGD in buckets of 3, which are the rows of the gradient as a matrix with three columns."""
SIXTEENS = "ternary:bucket=16 (reference)"
"""TernGrad in buckets of 16, which kernels do not take."""

METHODS = {
    THREES: "1Bit-SGD, as the paper",
    SIXTEENS: "TernGrad, as the paper",
    "onebit:group=64": "1Bit-SGD, the smallest group of a vector",
    "ternary:bucket=64": "TernGrad, the smallest bucket of kernels",
    QSGD: "QSGD, as the paper",
    ECQ_SGD: "ECQ-SGD, as the paper",
    CODED: "with its entropy code",
    WHOLE: "the same, the gradient as one tensor",
    "onebit": "defaults here",
    "ternary": "defaults here",
    "ecq:levels=7,norm=linf,bucket=4096,alpha=0.01": "better accuracy here",
}
"""The settings of section 6.2, footnote 1, and others."""


@dataclass(frozen=True)
class Settings:
    """One training without compression, whose gradients all methods encode beside each other.

    Attributes:
        seed: the recipe's seed.
        steps: the number of steps.
        batch: the number of images per step, of one worker.
        data: the recipe's data.
    """

    seed: int
    steps: int = 12
    batch: int = 64
    data: str = DATA


def cases(full: bool) -> list[Settings]:
    """``full`` has the paper's batch, and an epoch of CIFAR-10's length."""
    if full:
        return [Settings(seed, 390, 128) for seed in range(3)]
    return [Settings(seed) for seed in range(2)]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """The entropy and the size of each method's codes of all gradients, error feedback included."""
    s = settings
    recipe = Recipe("resnet20", NONE, s.seed, s.steps, 1, s.batch, lr=0.1, decay=0.5, data=s.data)
    training = Run(recipe)
    histograms = {text: Histogram() for text in METHODS}
    count = sum(math.prod(shape) for shape in training.shapes.values())
    joint: dict[str, tuple[int, ...]] = {WHOLE: (count,), THREES: (-(-count // 3), 3)}
    simulations = {
        text: _simulation(
            text,
            {"gradient": joint[text]} if text in joint else training.shapes,
            histograms[text],
        )
        for text in METHODS
    }

    def each(step: int, loss: float, gradients: Gradients) -> None:
        sent = {name: g[0].detach().contiguous().numpy() for name, g in gradients.items()}
        joined = np.concatenate([sent[name].reshape(-1) for name in training.shapes])
        for text, simulation in simulations.items():
            one = {"gradient": _as(joined, joint[text])} if text in joint else sent
            simulation.average([one])
        advance()

    training.train(each)
    return {
        text: {
            "code_bits": found.code_bits,
            "coded_bits": found.coded_bits,
            "packed_bits": found.packed_bits,
            "zeros": found.zeros,
        }
        for text, found in histograms.items()
    }


def _as(vector: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The vector with that shape, and zeros behind it where there is room."""
    return np.pad(vector, (0, math.prod(shape) - vector.size)).reshape(shape)


def _simulation(text: str, shapes: dict[str, tuple[int, ...]], histogram: Histogram) -> Simulation:
    if text == SIXTEENS:
        codec, small = SmallTernary(16), Reference(histogram.add)
        return Simulation("allgather", codec, codec.feedback, shapes, 1, arithmetic=small)
    compression = Compression.parse(text.partition(" (")[0])
    assert compression.codec is not None
    return Simulation(
        compression.exchange,
        compression.codec,
        compression.feedback,
        shapes,
        1,
        arithmetic=Native(histogram.add),
    )


def table(rows: list[Row]) -> Table:
    """Bits per element, and the ratio of 32 bits to them."""
    header = (
        "method",
        "settings",
        "zeros %",
        "entropy of a code",
        "with scales",
        "times smaller",
        "our payload",
        "times smaller",
    )
    lines = []
    for text, note in METHODS.items():
        coded, packed = values(rows, text, "coded_bits"), values(rows, text, "packed_bits")
        onebit = text.startswith("onebit")
        lines.append(
            (
                text,
                note,
                "-" if onebit else percent(rows, text, "zeros"),
                spread(values(rows, text, "code_bits")),
                spread(coded),
                spread(32 / coded),
                spread(packed),
                spread(32 / packed),
            )
        )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """The reduction, and the order of the methods."""
    ideal = {text: 32 / values(rows, text, "coded_bits") for text in METHODS}
    ratios = {text: float(of_seeds.mean()) for text, of_seeds in ideal.items()}
    reached = 32 / values(rows, WHOLE, "packed_bits")
    sent = [f"{one.mean():.1f}" for one in (reached, 32 / values(rows, CODED, "packed_bits"))]
    others = [THREES, SIXTEENS, QSGD]
    return [
        Claim(
            "ECQ-SGD's gradients are over 80 times smaller, with an entropy code",
            "over 80",
            f"{sent[0]} in payloads of the whole gradient, {sent[1]} in one of each tensor; "
            f"{ratios[ECQ_SGD]:.0f} with an ideal entropy code",
            judge(reached - 80),
        ),
        Claim(
            "ECQ-SGD compresses more than the other methods, with the paper's settings of each",
            "more",
            ", ".join(f"{text.partition(':')[0]} {ratios[text]:.1f}" for text in others)
            + f", ecq {ratios[ECQ_SGD]:.1f}",
            judge(*(ideal[ECQ_SGD] - ideal[text] for text in others)),
        ),
    ]


EXPERIMENT = Experiment(
    name="ecq-codes",
    paper="ECQ-SGD (Wu et al., 2018), section 6.2: entropy of ResNet-20's codes",
    cases=cases,
    ticks=lambda settings: settings.steps,
    run=run,
    table=table,
    claims=claims,
)
