"""TernGrad (Wen et al., 2017), tables 1 and 2: larger batches with more workers, and clipping, in kind."""

from __future__ import annotations

import numpy as np

from benchmarks.papers.experiment import (
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    percent,
    spread,
    values,
)
from benchmarks.papers.training import NONE, Recipe, outcome
from benchmarks.tables import Table
from benchmarks.verdicts import judge

TERNGRAD, NOCLIP = "ternary:bucket=tensor", "ternary:bucket=tensor,clip=none"
NAMES = {NONE: "floating", TERNGRAD: "TernGrad", NOCLIP: "TernGrad-noclip"}
PUBLISHED = {
    ("adam", 2, TERNGRAD): -0.92,
    ("adam", 16, TERNGRAD): -0.39,
    ("momentum", 2, TERNGRAD): 0.28,
    ("momentum", 2, NOCLIP): -2.70,
    ("momentum", 4, TERNGRAD): -0.04,
    ("momentum", 8, TERNGRAD): 0.92,
}
"""Differences to floating gradients in points, on CIFAR-10 (table 1) and of ImageNet's top-1 (table 2)."""
_IMAGES = 16
"""A worker's mini-batch; the paper's are 64 or 128 (table 1) and 128 (table 2)."""


def cases(full: bool) -> list[Recipe]:
    """Trainings of equally many epochs, mini-batches that grow with the workers, and table 2's rates."""
    images, seeds = (100_000, 10) if full else (12_000, 8)
    made = []
    for seed in range(seeds):
        for workers in (2, 16):
            made += [
                _recipe("adam", text, seed, workers, images, 0.001) for text in (NONE, TERNGRAD)
            ]
        for workers in (2, 4, 8):
            texts = (NONE, TERNGRAD, NOCLIP) if workers == 2 else (NONE, TERNGRAD)
            rate = 0.005 * workers
            made += [_recipe("momentum", text, seed, workers, images, rate) for text in texts]
    return made


def _recipe(optimizer: str, text: str, seed: int, workers: int, images: int, rate: float) -> Recipe:
    batch = _IMAGES * workers
    return Recipe(
        "lenet",
        text,
        seed,
        steps=images // batch,
        workers=workers,
        batch=batch,
        optimizer=optimizer,
        lr=rate,
        decay=0.5,
    )


def table(rows: list[Row]) -> Table:
    """Table 1, then table 2."""
    header = (
        "SGD",
        "workers",
        "mini-batch",
        "iterations",
        "gradients",
        "accuracy %",
        "training loss",
        "difference",
        "published difference",
    )
    lines = []
    for optimizer in kinds(rows, "optimizer"):
        for workers in kinds(choose(rows, optimizer=optimizer), "workers"):
            for text in NAMES:
                own = choose(rows, optimizer=optimizer, workers=workers, compression=text)
                if own:
                    published = PUBLISHED.get((optimizer, workers, text))
                    plain = choose(rows, optimizer=optimizer, workers=workers, compression=NONE)
                    difference = values(own, "test_accuracy") - values(plain, "test_accuracy")
                    lines.append(
                        (
                            optimizer,
                            str(workers),
                            str(own[0]["batch"]),
                            str(own[0]["steps"]),
                            NAMES[text],
                            percent(own, "test_accuracy"),
                            spread(values(own, "train_loss"), "{:.3f}"),
                            "-" if published is None else f"{100 * difference.mean():+.1f}",
                            "-" if published is None else f"{published:+.2f}",
                        )
                    )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Tables 1 and 2: little is lost, and more without clipping."""

    def accuracy(optimizer: str, workers: int, text: str) -> np.ndarray:
        own = choose(rows, optimizer=optimizer, workers=workers, compression=text)
        return 100 * values(own, "test_accuracy")

    lost = {n: accuracy("adam", n, TERNGRAD) - accuracy("adam", n, NONE) for n in (2, 16)}
    momentum = {
        n: accuracy("momentum", n, TERNGRAD) - accuracy("momentum", n, NONE) for n in (2, 4, 8)
    }
    noclip = accuracy("momentum", 2, NOCLIP) - accuracy("momentum", 2, TERNGRAD)
    losses = [
        float(
            values(
                choose(rows, optimizer="momentum", workers=2, compression=text), "train_loss"
            ).mean()
        )
        for text in (TERNGRAD, NOCLIP)
    ]
    return [
        Claim(
            "Adam: less than 1% of accuracy is lost (table 1)",
            "-0.92 and -0.39 points",
            _points(lost),
            judge(*(1 + points for points in lost.values())),
        ),
        Claim(
            "Adam: less is lost with more workers and a larger batch (table 1)",
            "-0.92 with 2, -0.39 with 16",
            _points(lost),
            judge(lost[16] - lost[2]),
        ),
        Claim(
            "momentum: about the accuracy of floating gradients with every batch (table 2)",
            "+0.28, -0.04, +0.92 points",
            _points(momentum),
            judge(*(1 + points for points in momentum.values())),
        ),
        Claim(
            "without clipping accuracy is lost (table 2)",
            "-2.98 points",
            f"{noclip.mean():+.1f} points; training loss {losses[1]:.3f} against {losses[0]:.3f}",
            judge(-noclip),
        ),
    ]


def _points(differences: dict[int, np.ndarray]) -> str:
    return ", ".join(f"{points.mean():+.1f} with {n}" for n, points in differences.items())


EXPERIMENT = Experiment(
    name="terngrad-tables",
    paper="TernGrad (Wen et al., 2017), tables 1 and 2: batches, workers, clipping, in kind",
    cases=cases,
    ticks=lambda recipe: recipe.steps,
    run=outcome,
    table=table,
    claims=claims,
)
