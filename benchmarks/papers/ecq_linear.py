"""ECQ-SGD (Wu et al., 2018), figure 2: linear regression on Syn-256, Syn-512 and Syn-1024."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
from benchmarks.pictures import figure
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import ECQ, ErrorFeedback, stability

FULL, QSGD, ECQ_SGD = "32bit-fp", "qsgd", "ecq-sgd"
CODEC = ECQ(4, "l2", "tensor")
METHODS = {
    FULL: Method(None),
    QSGD: Method(CODEC),
    ECQ_SGD: Method(CODEC, ErrorFeedback(0.2, 0.9)),
}
"""Section 6.1: 4 levels, the l2 norm, alpha = 0.2 and beta = 0.9."""


@dataclass(frozen=True)
class Settings:
    """One training.

    The paper gives the dimensions, the number of samples and the learning rate. It does not give the
    distributions, the number of workers, the mini-batch or the number of iterations.

    Attributes:
        dimension: the dimension of the features and of the model, all standard normal.
        method: the name in METHODS.
        seed: the seed of the data, the order of the samples, and the codec's noise.
        samples: the number of training samples.
        noise: the standard deviation of the labels' noise.
        rate: the learning rate.
        workers: the number of workers.
        batch: the number of samples per worker and iteration.
        iterations: the number of iterations.
        points: the number of points of the curves.
    """

    dimension: int
    method: str
    seed: int
    samples: int = 10_000
    noise: float = 1.0
    rate: float = 0.02
    workers: int = 4
    batch: int = 64
    iterations: int = 600
    points: int = 60


@dataclass(frozen=True)
class Regression:
    """Samples with linear labels, ``y = x w + noise``.

    Attributes:
        features: shape=(n, d), float32.
        labels: shape=(n,), float32.
        optimum: the least squares' solution, shape=(d,), float64.
    """

    features: np.ndarray
    labels: np.ndarray
    optimum: np.ndarray

    @classmethod
    def draw(cls, samples: int, dimension: int, noise: float, seed: int) -> Regression:
        """Draws the model, the features and the noise."""
        rng = np.random.default_rng([seed, 0])
        model = rng.standard_normal(dimension, np.float32)
        features = rng.standard_normal((samples, dimension), np.float32)
        labels = features @ model + np.float32(noise) * rng.standard_normal(samples, np.float32)
        wide = features.astype(np.float64)
        optimum = np.linalg.solve(wide.T @ wide, wide.T @ labels.astype(np.float64))
        return cls(features, labels, optimum)

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The gradient of half the mean squared error of some samples."""
        x = self.features[rows]
        return x.T @ (x @ w - self.labels[rows]) / np.float32(rows.size)

    def loss(self, w: np.ndarray) -> float:
        """Half the mean squared error of all samples."""
        return float(np.mean(np.square(self.features @ w - self.labels, dtype=np.float64)) / 2)


def cases(full: bool) -> list[Settings]:
    """The paper's data sets and five seeds; ``full`` adds iterations."""
    iterations = 4000 if full else 600
    return [
        Settings(dimension, method, seed, iterations=iterations)
        for seed in range(5)
        for dimension in (256, 512, 1024)
        for method in METHODS
    ]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """The curves of the loss, and of the distance to the least squares' solution."""
    s = settings
    data = Regression.draw(s.samples, s.dimension, s.noise, s.seed)
    every = max(1, s.iterations // s.points)
    curve: list[tuple[int, float, float]] = []

    def look(iteration: int, w: np.ndarray) -> None:
        if iteration % every == 0 or iteration == s.iterations:
            curve.append((iteration, data.loss(w), float(np.linalg.norm(w - data.optimum))))
        if iteration:
            advance()

    drawn = linear.batches(s.samples, s.workers, s.batch, s.iterations, s.seed)
    linear.train(METHODS[s.method], data.gradient, drawn, s.dimension, s.rate, look, seed=s.seed)
    steps, losses, distances = (list(column) for column in zip(*curve, strict=True))
    # The last fifth of the iterations: one iterate is one draw of the noise.
    last = max(1, len(curve) // 5)
    return {
        "iterations": steps,
        "loss": [float(f"{loss:.5g}") for loss in losses],
        "distance": [float(f"{distance:.5g}") for distance in distances],
        "least_loss": data.loss(data.optimum.astype(np.float32)),
        "final_loss": float(np.mean(losses[-last:])),
        "final_distance": float(np.mean(distances[-last:])),
        "lambda": _growth(METHODS[s.method], s.dimension),
    }


def table(rows: list[Row]) -> Table:
    """Means over the last fifth of the iterations, and over the seeds."""
    header = ("data set", "method", "lambda", "loss above the least", "distance to the optimum")
    lines = []
    for dimension in kinds(rows, "dimension"):
        for method in kinds(rows, "method"):
            own = choose(rows, dimension=dimension, method=method)
            growth = own[0]["result"]["lambda"]
            excess = values(own, "final_loss") - values(own, "least_loss")
            lines.append(
                (
                    f"Syn-{dimension}",
                    method,
                    "-" if growth is None else f"{growth:.2f}",
                    spread(excess),
                    spread(values(own, "final_distance")),
                )
            )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """Figure 2's two orders, on each data set and with each seed."""
    found = []
    for dimension in kinds(rows, "dimension"):
        by_method = {method: choose(rows, dimension=dimension, method=method) for method in METHODS}
        plain, qsgd, ecq = (values(own, "final_distance") for own in by_method.values())
        ratio = (ecq - plain).mean() / (qsgd - plain).mean()
        found.append(
            Claim(
                f"Syn-{dimension}: ECQ-SGD's gap in distance to 32-bit SGD is clearly smaller than "
                "QSGD's (figure 2, bottom)",
                "smaller",
                f"{ratio:.2f} of QSGD's; smaller with {int((ecq < qsgd).sum())} of {ecq.size} seeds",
                judge(qsgd - ecq),
            )
        )
        speeds = {m: np.array([_reached(one) for one in own]) for m, own in by_method.items()}
        found.append(
            Claim(
                f"Syn-{dimension}: ECQ-SGD's loss falls significantly faster than QSGD's (figure 2, top)",
                "faster",
                "iterations until 1% of the first loss is left: "
                + ", ".join(f"{m} {speed.mean():.0f}" for m, speed in speeds.items()),
                judge(speeds[QSGD] - speeds[ECQ_SGD]),
            )
        )
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Figure 2: the loss above the least on top, the distance below; means over the seeds."""
    dimensions = kinds(rows, "dimension")
    with figure(path, 2, len(dimensions), sharex=True) as axes:
        for column, dimension in enumerate(dimensions):
            for color, method in enumerate(METHODS):
                own = choose(rows, dimension=dimension, method=method)
                steps = own[0]["result"]["iterations"]
                least = values(own, "least_loss")[:, None]
                losses = np.array([one["result"]["loss"] for one in own]) - least
                distances = np.array([one["result"]["distance"] for one in own])
                style = {"color": f"C{color}", "label": method, "lw": 1.2}
                axes[0, column].plot(steps, losses.mean(0), **style)
                axes[1, column].plot(steps, distances.mean(0), **style)
            axes[0, column].set_title(f"Syn-{dimension}")
            axes[1, column].set_xlabel("iteration")
            for row in range(2):
                axes[row, column].set_yscale("log")
                axes[row, column].minorticks_off()
        axes[0, 0].set_ylabel("loss above the least")
        axes[1, 0].set_ylabel("distance to the optimum")
        axes[0, 0].legend(frameon=False)


def _reached(row: Row) -> float:
    """The first iteration that is looked at with less than 1% of the first loss; if none, the last one."""
    result = row["result"]
    excess = np.array(result["loss"]) - result["least_loss"]
    below = np.flatnonzero(excess < 0.01 * excess[0])
    return float(result["iterations"][below[0] if below.size else -1])


def _growth(method: Method, dimension: int) -> float | None:
    if method.codec is None or not method.feedback.enabled:
        return None
    return stability.growth(
        method.feedback.alpha, method.feedback.beta, method.codec.variance_factor(dimension)
    )


EXPERIMENT = Experiment(
    name="ecq-linear",
    paper="ECQ-SGD (Wu et al., 2018), figure 2: Syn-256, Syn-512, Syn-1024",
    cases=cases,
    ticks=lambda settings: settings.iterations,
    run=run,
    table=table,
    claims=claims,
    draw=draw,
)
