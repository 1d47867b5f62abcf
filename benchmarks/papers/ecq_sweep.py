"""ECQ-SGD (Wu et al., 2018), table 2: the best alpha and beta, in kind."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from benchmarks.papers.experiment import Claim, Experiment, Row, choose, spread, values
from benchmarks.papers.training import NONE, Compression, Recipe, outcome
from benchmarks.tables import Table
from benchmarks.verdicts import judge, mostly
from hvd_compress.codecs import stability

PUBLISHED = {
    (0.01, 0.90): 12.05,
    (0.01, 0.95): 11.47,
    (0.01, 0.98): 10.69,
    (0.01, 0.99): 9.64,
    (0.01, 1.00): 8.25,
    (0.001, 1.00): 9.18,
    (0.003, 1.00): 9.06,
    (0.030, 1.00): 8.18,
    (0.100, 1.00): 8.22,
    (0.150, 1.00): None,
}
"""Error rates of ResNet-20 on CIFAR-10 in per cent, by alpha and beta; None did not converge."""
BEYOND = (0.2, 0.4, 1.0)
"""Alphas of ours, with beta = 1, further beyond the bound."""
_BUCKET = 4096
QSGD = f"qsgd:levels=4,norm=l2,bucket={_BUCKET}"


def cases(full: bool) -> list[Recipe]:
    """LeNet; ``full`` is ResNet-20 with the paper's recipe."""
    pairs = [*PUBLISHED, *((alpha, 1.0) for alpha in BEYOND)]
    texts = [
        NONE,
        QSGD,
        *(
            f"ecq:levels=4,norm=l2,alpha={alpha},beta={beta},bucket={_BUCKET}"
            for alpha, beta in pairs
        ),
    ]
    common: dict[str, Any] = {"model": "lenet", "steps": 200, "workers": 2, "lr": 0.02}
    if full:
        common = {"model": "resnet20", "steps": 78_000, "workers": 2, "lr": 0.1, "batch": 128}
    seeds = 6
    return [
        Recipe(compression=text, seed=seed, **common) for seed in range(seeds) for text in texts
    ]


def table(rows: list[Row]) -> Table:
    """In the paper's order."""
    header = ("alpha", "beta", "lambda", "test error %", "training loss", "published error %")
    lines = []
    for text in dict.fromkeys(one["compression"] for one in rows):
        own = choose(rows, compression=text)
        alpha, beta, growth = _coefficients(text)
        lines.append(
            (
                text if alpha is None else f"{alpha:g}",
                "-" if beta is None else f"{beta:g}",
                "-" if growth is None else f"{growth:.3f}",
                spread(_errors(own), "{:.1f}"),
                spread(values(own, "train_loss"), "{:.3f}"),
                _published(alpha, beta),
            )
        )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Section 6.4's three statements, by the training loss: test errors are too coarse here."""
    losses = {
        _coefficients(text)[:2]: values(choose(rows, compression=text), "train_loss")
        for text in dict.fromkeys(one["compression"] for one in rows)
        if text.startswith("ecq")
    }
    qsgd = values(choose(rows, compression=QSGD), "train_loss")
    betas = {beta: losses[0.01, beta] for beta in (0.90, 0.95, 0.98, 0.99, 1.00)}
    middle = [losses[alpha, 1.0] for alpha in (0.01, 0.03, 0.1)]
    small = losses[0.001, 1.0]
    found = [
        Claim(
            "with alpha = 0.01, beta = 1 is best",
            "8.25% against 9.64% to 12.05%",
            "training loss "
            + ", ".join(f"{beta:g}: {loss.mean():.3f}" for beta, loss in betas.items()),
            judge(*(loss - betas[1.0] for beta, loss in betas.items() if beta < 1)),
        ),
        Claim(
            "with beta = 1, alpha from 0.01 to 0.1 makes little difference",
            "8.18% to 8.25%",
            "training loss " + ", ".join(f"{loss.mean():.3f}" for loss in middle),
            judge(*(1.25 * one - other for one, other in permutations(middle, 2))),
        ),
        Claim(
            "a small alpha is as QSGD",
            "9.18% with 0.001",
            f"training loss {small.mean():.3f}, QSGD {qsgd.mean():.3f}",
            judge(1.1 * qsgd - small, small - 0.9 * qsgd),
        ),
    ]
    for alpha in (0.15, *BEYOND):
        own = losses[alpha, 1.0]
        growth = stability.growth(alpha, 1.0, 16.0)
        text = (
            "with alpha = 0.15 training does not converge"
            if alpha == 0.15
            else f"(alpha = {alpha:g}"
        )
        found.append(
            Claim(
                text
                + (f", lambda = {growth:.2f}" if alpha == 0.15 else f", lambda = {growth:.2f})"),
                "N/A" if alpha == 0.15 else "diverges where lambda > 1",
                f"diverges with {int(np.isnan(own).sum())} of {own.size} seeds",
                mostly(int(np.isnan(own).sum()), own.size),
            )
        )
    return found


def _coefficients(text: str) -> tuple[float | None, float | None, float | None]:
    """Alpha, beta and lambda, with the variance factor of a whole bucket."""
    compression = Compression.parse(text)
    if compression.codec is None or not compression.feedback.enabled:
        return None, None, None
    alpha, beta = compression.feedback.alpha, compression.feedback.beta
    gamma = compression.codec.variance_factor(_BUCKET)
    return alpha, beta, stability.growth(alpha, beta, gamma)


def _errors(rows: list[Row]) -> np.ndarray:
    return 100 * (1 - values(rows, "test_accuracy"))


def _published(alpha: float | None, beta: float | None) -> str:
    if alpha is None or beta is None or (alpha, beta) not in PUBLISHED:
        return "-"
    error = PUBLISHED[alpha, beta]
    return "N/A" if error is None else f"{error:g}"


EXPERIMENT = Experiment(
    name="ecq-sweep",
    paper="ECQ-SGD (Wu et al., 2018), table 2: alpha and beta, in kind",
    cases=cases,
    ticks=lambda recipe: recipe.steps,
    run=outcome,
    table=table,
    claims=claims,
)
