"""ECQ-SGD (Wu et al., 2018), figure 3: bits and losses of linear regression on Syn-20k."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers import linear
from benchmarks.papers.ecq_linear import Regression
from benchmarks.papers.experiment import (
    Advance,
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    spread,
    values,
)
from benchmarks.papers.linear import Method
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import ECQ, ErrorFeedback, stability

FULL = "32bit-fp"
FEEDBACK = {"0.2": ErrorFeedback(0.2, 0.9), "0.05": ErrorFeedback(0.05, 0.9)}
"""The coefficients of the smaller data sets (section 6.1), and others below the bound of Syn-20k, for which
the paper has none."""


@dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        method: ``"32bit-fp"``, ``"qsgd-LEVELS"`` or ``"ecq-sgd-LEVELS-ALPHA"``.
        seed: the seed of the data, the order of the samples, and the codec's noise.
        dimension: the dimension of the model.
        samples: the number of training samples.
        iterations: the paper's 1,000.
        workers: the number of workers; the paper does not say.
        batch: the number of samples per worker and iteration; the paper does not say.
        rate: the learning rate; the paper does not say.
        noise: the standard deviation of the labels' noise.
    """

    method: str
    seed: int
    dimension: int = 20_000
    samples: int = 50_000
    iterations: int = 1000
    workers: int = 4
    batch: int = 512
    rate: float = 0.004
    noise: float = 1.0

    @property
    def way(self) -> Method:
        """The codec and the error feedback of the gradients."""
        name, _, rest = self.method.partition("sgd-")
        if self.method == FULL:
            return Method(None)
        levels, _, alpha = rest.partition("-")
        codec = ECQ(int(levels), "l2", "tensor")
        return Method(codec, FEEDBACK[alpha]) if name == "ecq-" else Method(codec)


METHODS = (
    FULL,
    "qsgd-4",
    "qsgd-16",
    *(f"ecq-sgd-{levels}-{alpha}" for levels in (4, 16) for alpha in FEEDBACK),
)


def cases(full: bool) -> list[Settings]:
    """The paper's data take four gigabytes; by default features and samples are a sixteenth."""
    if full:
        return [Settings(method, seed) for seed in range(8) for method in METHODS]
    return [
        Settings(method, seed, 1250, 3125, 400, batch=128, rate=0.01)
        for seed in range(8)
        for method in METHODS
    ]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """The loss on new samples, and the bits that a worker sent."""
    s = settings
    data, test = _draw(s)
    last = np.zeros(s.dimension, np.float32)

    def look(iteration: int, w: np.ndarray) -> None:
        nonlocal last
        last = w
        if iteration:
            advance()

    drawn = linear.batches(s.samples, s.workers, s.batch, s.iterations, s.seed)
    histogram = linear.train(s.way, data.gradient, drawn, s.dimension, s.rate, look, seed=s.seed)
    with np.errstate(over="ignore", invalid="ignore"):
        loss = test.loss(last)
    diverged = not math.isfinite(loss) or loss > test.loss(np.zeros_like(last))
    return {
        "test_loss": None if diverged else loss,
        "packed_bits": 32.0 if histogram is None else histogram.packed_bits,
        "coded_bits": 32.0 if histogram is None else histogram.coded_bits,
        "lambda": _growth(s),
    }


def _draw(s: Settings) -> tuple[Regression, Regression]:
    """Training and test samples of one model, without the least squares' solution."""
    rng = np.random.default_rng([s.seed, 0])
    model = rng.standard_normal(s.dimension, np.float32)
    parts = []
    for count in (s.samples, 1000):
        x = rng.standard_normal((count, s.dimension), np.float32)
        y = x @ model + np.float32(s.noise) * rng.standard_normal(count, np.float32)
        parts.append(Regression(x, y, model.astype(np.float64)))
    return parts[0], parts[1]


def _growth(s: Settings) -> float | None:
    way = s.way
    if way.codec is None or not way.feedback.enabled:
        return None
    gamma = way.codec.variance_factor(s.dimension)
    return stability.growth(way.feedback.alpha, way.feedback.beta, gamma)


def table(rows: list[Row]) -> Table:
    """One line a method."""
    header = ("method", "lambda", "test loss", "payload bits an element", "with an entropy code")
    lines = []
    for method in kinds(rows, "method"):
        own = choose(rows, method=method)
        growth = own[0]["result"]["lambda"]
        lines.append(
            (
                method,
                "-" if growth is None else f"{growth:.2f}",
                spread(values(own, "test_loss")),
                spread(values(own, "packed_bits"), "{:.2f}"),
                spread(values(own, "coded_bits"), "{:.2f}"),
            )
        )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Figure 3's losses; its times are those of the paper's cluster."""
    losses = {
        method: values(choose(rows, method=method), "test_loss") for method in kinds(rows, "method")
    }
    plain = losses[FULL]
    found = []
    for levels in (4, 16):
        ecq, qsgd = losses[f"ecq-sgd-{levels}-0.05"], losses[f"qsgd-{levels}"]
        found.append(
            Claim(
                f"s = {levels}: ECQ-SGD's test loss is similar to 32-bit SGD's",
                "similar",
                f"{spread(ecq)} against {spread(plain)}; QSGD {spread(qsgd)}",
                judge(1.2 * plain - ecq),
            )
        )
        found.append(
            Claim(
                f"s = {levels}: ECQ-SGD's test loss is nearer to 32-bit SGD's than QSGD's",
                "nearer",
                f"{spread(ecq)} and {spread(qsgd)}",
                judge(qsgd - ecq),
            )
        )
    return found


EXPERIMENT = Experiment(
    name="ecq-large",
    paper="ECQ-SGD (Wu et al., 2018), figure 3: Syn-20k",
    cases=cases,
    ticks=lambda settings: settings.iterations,
    run=run,
    table=table,
    claims=claims,
)
