"""TernGrad (Wen et al., 2017), figure 3: accuracy of LeNet with 1 to 64 workers."""

from __future__ import annotations

from pathlib import Path

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
from benchmarks.pictures import figure
from benchmarks.tables import Table
from benchmarks.verdicts import judge

TERNGRAD = "ternary:bucket=tensor,clip=2.5"
"""Layer-wise scales, clipped at 2.5 standard deviations (section 3.3), a scale for each worker."""
RATES = {"momentum": 0.01, "sgd": 0.1}
"""Base learning rates of figure 3 (a) and (b)."""


def cases(full: bool) -> list[Recipe]:
    """The paper's batch, weight decay, averaging and decay; ``full`` has its 10,000 iterations."""
    counts = (1, 2, 4, 8, 16, 32, 64) if full else (1, 8, 64)
    made = []
    for seed in range(4):
        for optimizer, rate in RATES.items():
            # The mean of the workers' gradients does not depend on their number.
            pairs = [(NONE, 1), *((TERNGRAD, workers) for workers in counts)]
            for compression, workers in pairs:
                made.append(
                    Recipe(
                        model="lenet",
                        compression=compression,
                        seed=seed,
                        steps=10_000 if full else 300,
                        workers=workers,
                        batch=64,
                        optimizer=optimizer,
                        lr=rate,
                        decay=0.5,
                        weight_decay=0.0005,
                        averaging=0.9999,
                    )
                )
    return made


def table(rows: list[Row]) -> Table:
    """One line a number of workers."""
    header = ("SGD", "gradients", "workers", "accuracy %", "of averaged weights %", "training loss")
    lines = []
    for optimizer in kinds(rows, "optimizer"):
        for compression in kinds(rows, "compression"):
            for workers in kinds(rows, "workers"):
                own = choose(rows, optimizer=optimizer, compression=compression, workers=workers)
                if own:
                    lines.append(
                        (
                            optimizer,
                            "floating" if compression == NONE else "TernGrad",
                            str(workers),
                            percent(own, "test_accuracy"),
                            percent(own, "averaged_accuracy"),
                            spread(values(own, "train_loss"), "{:.3f}"),
                        )
                    )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """No degradation, with 64 workers either."""
    found = []
    for optimizer in kinds(rows, "optimizer"):
        plain = values(choose(rows, optimizer=optimizer, compression=NONE), "averaged_accuracy")
        ternary = choose(rows, optimizer=optimizer, compression=TERNGRAD)
        differences = {
            workers: 100 * (values(choose(ternary, workers=workers), "averaged_accuracy") - plain)
            for workers in kinds(ternary, "workers")
        }
        found.append(
            Claim(
                f"{optimizer}: TernGrad reaches a similar accuracy with 1 to 64 workers (figure 3)",
                "-0.22 to +0.15 points",
                ", ".join(f"{n}: {d.mean():+.1f}" for n, d in differences.items()) + " points",
                judge(*(1 + points for points in differences.values())),
            )
        )
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Figure 3: accuracy of the averaged weights over the number of workers."""
    optimizers = kinds(rows, "optimizer")
    with figure(path, 1, len(optimizers), sharey=True) as axes:
        for column, optimizer in enumerate(optimizers):
            plain = values(choose(rows, optimizer=optimizer, compression=NONE), "averaged_accuracy")
            ternary = choose(rows, optimizer=optimizer, compression=TERNGRAD)
            counts = kinds(ternary, "workers")
            means = [
                100 * values(choose(ternary, workers=n), "averaged_accuracy").mean() for n in counts
            ]
            axes[0, column].axhline(100 * plain.mean(), color="0.4", ls="--", label="floating")
            axes[0, column].plot(counts, means, "o-", color="C0", label="TernGrad")
            axes[0, column].set_xscale("log", base=2)
            axes[0, column].set(xlabel="workers", title=optimizer)
            axes[0, column].grid(alpha=0.3)
        axes[0, 0].set_ylabel("test accuracy, %")
        axes[0, 0].legend(frameon=False)


EXPERIMENT = Experiment(
    name="terngrad-workers",
    paper="TernGrad (Wen et al., 2017), figure 3: workers, in kind",
    cases=cases,
    ticks=lambda recipe: recipe.steps,
    run=outcome,
    table=table,
    claims=claims,
    draw=draw,
)
