"""ECQ-SGD (Wu et al., 2018), figure 4 and table 1: linear models on real data, in kind.

The paper's data sets have to be downloaded. In their place stand two that come with scikit-learn:
diabetes, with products of features (65, for YearPredictionMSD's 90), and fours and nines among the digits,
with products of pixels (5,000, as gisette, whose task is the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.papers import linear
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
from hvd_compress.codecs import ECQ, ErrorFeedback, OneBit, Ternary

REGRESSION, CLASSIFICATION = "diabetes", "fours-and-nines"
FULL, ECQ_SGD = "32bit-fp", "ecq-sgd"
_LAST_ERROR = ErrorFeedback(1.0, 1 / 16)
METHODS = {
    FULL: Method(None),
    "1bit-sgd": Method(OneBit("tensor"), ErrorFeedback(1.0, 1.0)),
    "1bit-sgd, last error": Method(OneBit("tensor"), _LAST_ERROR),
    "terngrad": Method(Ternary("tensor", 2.5)),
    "qsgd": Method(ECQ(4, "l2", "tensor")),
    ECQ_SGD: Method(ECQ(4, "l2", "tensor"), ErrorFeedback(0.1, 0.9)),
}
"""One scale for all elements. The paper says that its 1Bit-SGD keeps the error of the last iteration alone,
which is a beta of 0; the nearest that there is here is 1/16."""
PUBLISHED = {
    REGRESSION: {
        FULL: (4.99e3, 1.0),
        "1bit-sgd": (6.57e3, 19.07),
        "terngrad": (5.04e3, 20.43),
        "qsgd": (5.11e3, 24.63),
        ECQ_SGD: (5.00e3, 23.62),
    },
    CLASSIFICATION: {
        FULL: (1.16e-1, 1.0),
        "1bit-sgd": (1.47e-1, 61.75),
        "terngrad": (1.16e-1, 34.67),
        "qsgd": (1.48e-1, 272.18),
        ECQ_SGD: (1.16e-1, 281.88),
    },
}
"""Table 1's losses and ratios, of YearPredictionMSD and of gisette."""


@dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        data: the data set.
        method: the name in METHODS.
        seed: the seed of the split, the order of the samples, and the codec's noise.
        iterations: the paper's 1,000.
        workers: the number of workers; the paper does not say.
        batch: the number of samples per worker and iteration; the paper does not say.
    """

    data: str
    method: str
    seed: int
    iterations: int = 1000
    workers: int = 4
    batch: int = 16


@dataclass(frozen=True)
class Samples:
    """Features, shape=(n, d), float32, the first of which is 1; labels, numbers or -1 and 1."""

    features: np.ndarray
    labels: np.ndarray

    def part(self, rows: np.ndarray) -> Samples:
        """Some of them."""
        return Samples(self.features[rows], self.labels[rows])


def squared(w: np.ndarray, samples: Samples) -> tuple[float, np.ndarray]:
    """The squared l2 loss, and its gradient."""
    error = samples.features @ w - samples.labels
    loss = float(np.mean(np.square(error, dtype=np.float64)))
    return loss, 2 * samples.features.T @ error / np.float32(error.size)


def logistic(w: np.ndarray, samples: Samples) -> tuple[float, np.ndarray]:
    """The log-loss, and its gradient."""
    margin = samples.labels * (samples.features @ w)
    loss = float(np.mean(np.logaddexp(0, -margin.astype(np.float64))))
    weight = -samples.labels / (1 + np.exp(np.minimum(margin, 60)))
    return loss, samples.features.T @ weight.astype(np.float32) / np.float32(weight.size)


@dataclass(frozen=True)
class Task:
    """A loss, its learning rate, and the data."""

    loss: Callable[[np.ndarray, Samples], tuple[float, np.ndarray]]
    rate: float
    load: Callable[[], Samples]


@cache
def diabetes() -> Samples:
    """442 patients, standardised features and their products; the labels are standardised, too."""
    from sklearn.datasets import load_diabetes

    raw = load_diabetes()
    pairs = np.triu_indices(raw.data.shape[1])
    x = _standardised(raw.data)
    products = _standardised(x[:, pairs[0]] * x[:, pairs[1]])
    return _samples(np.hstack([x, products]), _standardised(raw.target))


@cache
def fours_and_nines() -> Samples:
    """361 images of 8x8: pixels, products of pairs of them, and as many features that say nothing."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    chosen = np.isin(raw.target, (4, 9))
    x = raw.data[chosen] / 16
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, x.shape[1], (2, 2500 - x.shape[1]))
    features = np.hstack([x, x[:, first] * x[:, second]])
    probes = np.stack([rng.permutation(column) for column in features.T], axis=1)
    return _samples(np.hstack([features, probes]), np.where(raw.target[chosen] == 4, 1.0, -1.0))


TASKS = {
    REGRESSION: Task(squared, 0.005, diabetes),
    CLASSIFICATION: Task(logistic, 0.05, fours_and_nines),
}


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def _samples(features: np.ndarray, labels: np.ndarray) -> Samples:
    ones = np.ones((len(features), 1))
    return Samples(np.hstack([ones, features]).astype(np.float32), labels.astype(np.float32))


def cases(full: bool) -> list[Settings]:
    """The paper's 1,000 iterations and five runs; ``full`` has 20 runs, as these data are small."""
    return [
        Settings(data, method, seed)
        for seed in range(20 if full else 5)
        for data in TASKS
        for method in METHODS
    ]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Losses after the last iteration, and a worker's bits with an ideal entropy code."""
    s = settings
    task = TASKS[s.data]
    everything = task.load()
    count, dimension = everything.features.shape
    order = np.random.default_rng([s.seed, 2]).permutation(count)
    train, test = everything.part(order[count // 5 :]), everything.part(order[: count // 5])
    last = np.zeros(dimension, np.float32)

    def look(iteration: int, w: np.ndarray) -> None:
        nonlocal last
        last = w
        if iteration:
            advance()

    histogram = linear.train(
        METHODS[s.method],
        lambda w, rows: task.loss(w, train.part(rows))[1],
        linear.batches(len(train.labels), s.workers, s.batch, s.iterations, s.seed),
        dimension,
        task.rate,
        look,
        seed=s.seed,
    )
    losses = [task.loss(last, samples)[0] for samples in (train, test)]
    coded = 32.0 if histogram is None else histogram.coded_bits
    return {
        "train_loss": losses[0] if math.isfinite(losses[0]) else None,
        "test_loss": losses[1] if math.isfinite(losses[1]) else None,
        "bits": coded * dimension * s.iterations,
        "ratio": 32 / coded,
        "packed_ratio": 1.0 if histogram is None else 32 / histogram.packed_bits,
    }


def table(rows: list[Row]) -> Table:
    """Table 1's columns, and the ratio of our payloads."""
    header = (
        "data",
        "method",
        "training loss",
        "test loss",
        "bits",
        "ratio",
        "ratio of our payloads",
        "published loss",
        "published ratio",
    )
    lines = []
    for data in kinds(rows, "data"):
        for method in METHODS:
            own = choose(rows, data=data, method=method)
            loss, ratio = PUBLISHED[data].get(method, (None, None))
            lines.append(
                (
                    data,
                    method,
                    spread(values(own, "train_loss")),
                    spread(values(own, "test_loss")),
                    f"{values(own, 'bits').mean():.3g}",
                    f"{values(own, 'ratio').mean():.1f}",
                    f"{values(own, 'packed_ratio').mean():.1f}",
                    "-" if loss is None else f"{loss:.3g}",
                    "-" if ratio is None else f"{ratio:.1f}",
                )
            )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """Table 1's orders."""
    found = []
    for data in kinds(rows, "data"):
        losses = {m: values(choose(rows, data=data, method=m), "train_loss") for m in METHODS}
        loss = {m: float(of_seeds.mean()) for m, of_seeds in losses.items()}
        ratios = {m: values(choose(rows, data=data, method=m), "ratio") for m in METHODS}
        ratio = {m: float(of_seeds.mean()) for m, of_seeds in ratios.items()}
        paper = PUBLISHED[data]
        found += [
            Claim(
                f"{data}: ECQ-SGD's loss matches 32-bit SGD's",
                f"{paper[ECQ_SGD][0]:.3g} against {paper[FULL][0]:.3g}",
                f"{loss[ECQ_SGD]:.3g} against {loss[FULL]:.3g}",
                judge(1.05 * losses[FULL] - losses[ECQ_SGD]),
            ),
            Claim(
                f"{data}: QSGD's loss is larger than ECQ-SGD's",
                f"{paper['qsgd'][0]:.3g} against {paper[ECQ_SGD][0]:.3g}",
                f"{loss['qsgd']:.3g} against {loss[ECQ_SGD]:.3g}",
                judge(losses["qsgd"] - losses[ECQ_SGD]),
            ),
            Claim(
                f"{data}: 1Bit-SGD's loss is clearly larger",
                f"{paper['1bit-sgd'][0]:.3g} against {paper[FULL][0]:.3g}",
                f"{loss['1bit-sgd']:.3g} against {loss[FULL]:.3g}; with the last error alone "
                f"{loss['1bit-sgd, last error']:.3g}",
                judge(losses["1bit-sgd"] - 1.2 * losses[FULL]),
            ),
            Claim(
                f"{data}: ECQ-SGD sends fewer bits than TernGrad",
                f"{paper[ECQ_SGD][1]:.3g} against {paper['terngrad'][1]:.3g} times fewer than 32",
                f"{ratio[ECQ_SGD]:.3g} against {ratio['terngrad']:.3g}",
                judge(ratios[ECQ_SGD] - ratios["terngrad"]),
            ),
        ]
    return found


EXPERIMENT = Experiment(
    name="ecq-real",
    paper="ECQ-SGD (Wu et al., 2018), figure 4 and table 1: linear models, in kind",
    cases=cases,
    ticks=lambda settings: settings.iterations,
    run=run,
    table=table,
    claims=claims,
)
