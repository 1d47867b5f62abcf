"""1-bit SGD (Seide et al., 2014), sections 3 and 5.2: error feedback, and groups, in kind."""

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
from benchmarks.verdicts import judge, mostly

COLUMN, ROW, TENSOR = "onebit:group=column", "onebit:group=row", "onebit:group=tensor"
GROUPS = (COLUMN, ROW, TENSOR, "onebit")
SENT = "exchange=two_shot"
"""Gradients are quantized twice (section 3.1)."""


def without_feedback(compression: str) -> str:
    """The same without error feedback."""
    return f"{compression}{',' if ':' in compression else ':'}alpha=0"


def cases(full: bool) -> list[Recipe]:
    """Four nodes, a start without quantization, a sigmoid network; ``full`` is longer.

    The paper's start is 24 of 309 hours in seven passes: of its 2,163 hours, about one in 90.
    """
    steps = 2000 if full else 200
    texts = [NONE, *GROUPS, *map(without_feedback, GROUPS), f"onebit:{SENT}"]
    return [
        Recipe("sigmoid", text, seed, steps, lr=0.05, cold_start=steps // 90)
        for seed in range(6)
        for text in texts
    ]


def table(rows: list[Row]) -> Table:
    """One line a way to send."""
    header = (
        "gradients",
        "test accuracy %",
        "training accuracy %",
        "training loss",
        "bytes a step",
    )
    lines = []
    for text in kinds(rows, "compression"):
        own = choose(rows, compression=text)
        lines.append(
            (
                text,
                percent(own, "test_accuracy"),
                percent(own, "train_accuracy"),
                spread(values(own, "train_loss"), "{:.3f}"),
                f"{own[0]['result']['payload_bytes']:,}",
            )
        )
    return Table(header, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Nearly no loss with feedback, divergence without, for columns, which the paper has."""

    def accuracy(text: str) -> np.ndarray:
        return 100 * values(choose(rows, compression=text), "test_accuracy")

    plain, column = accuracy(NONE), accuracy(COLUMN)
    without = choose(rows, compression=without_feedback(COLUMN))
    diverged = sum(one["result"]["diverged"] for one in without)
    losses = {text: values(choose(rows, compression=text), "train_loss") for text in GROUPS}
    bare = {
        text: values(choose(rows, compression=without_feedback(text)), "train_loss")
        for text in GROUPS
    }
    return [
        Claim(
            "with error feedback there is no or nearly no loss of accuracy (table 2)",
            "word error rate 16.3% against 16.5%; with ReLUs 16.6% against 16.5%",
            f"{column.mean():.1f}% against {plain.mean():.1f}%",
            judge(column - plain + 1),
        ),
        Claim(
            "without error feedback training quickly diverges (section 5.2)",
            "diverges",
            f"diverges with {diverged} of {len(without)} seeds, accuracy "
            f"{accuracy(without_feedback(COLUMN)).mean():.1f}% against {column.mean():.1f}%",
            mostly(diverged, len(without)),
        ),
        Claim(
            "without error feedback it does not work well (section 3)",
            "-",
            "training loss without and with: "
            + ", ".join(f"{t}: {bare[t].mean():.3f} and {losses[t].mean():.3f}" for t in GROUPS),
            judge(*(bare[text] - losses[text] for text in GROUPS)),
        ),
    ]


EXPERIMENT = Experiment(
    name="onebit-feedback",
    paper="1-bit SGD (Seide et al., 2014), table 2 and section 5.2: error feedback, in kind",
    cases=cases,
    ticks=lambda recipe: recipe.steps,
    run=outcome,
    table=table,
    claims=claims,
)
