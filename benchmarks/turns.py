"""Choices that are measured in turns, each beside stock in the same round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.tables import Table

FIRST = 5
"""Steps at the start that are not counted: graphs are traced, names negotiated."""

Turn = Callable[[str, int], tuple[float, float]]
"""Makes so many steps of a choice; seconds of a step on the clock, and of processor time."""


def order(names: Sequence[str], number: int) -> Sequence[str]:
    """The choices in the order of a round: every other one backwards, so that what changes slowly on a
    machine favours none.

    Args:
        names: of the choices.
        number: of the round.
    """
    return names[:: -1 if number % 2 else 1]


def measure(turn: Turn, names: Sequence[str], rounds: int, block: int) -> np.ndarray:
    """Seconds of a step, shape=(choices, rounds, 2): on the clock, and of processor time.

    Args:
        turn: called with every choice in each round.
        names: of the choices.
        rounds: how many.
        block: steps of a choice in a round.
    """
    for name in names:
        turn(name, FIRST)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in tqdm(range(rounds), unit="round", disable=not sys.stderr.isatty()):
        for name in order(names, number):
            seconds[name].append(turn(name, block))
    return np.array([seconds[name] for name in names])


def row(seconds: np.ndarray, stock: np.ndarray) -> dict[str, Any]:
    """Medians over rounds of both times, of their ratios to stock's, and the middle half of these."""
    ratios = seconds / stock
    (low, cpu_low), (middle, cpu_middle), (high, cpu_high) = np.quantile(
        ratios, [0.25, 0.5, 0.75], axis=0
    ).tolist()
    wall, cpu = np.median(seconds, axis=0).tolist()
    return {
        "seconds": wall,
        "ratio": [middle, low, high],
        "cpu_seconds": cpu,
        "cpu_ratio": [cpu_middle, cpu_low, cpu_high],
        "rounds": seconds.tolist(),
    }


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """One line a choice."""
    header = (
        "compression",
        "step ms",
        "times stock",
        "middle half",
        "CPU ms",
        "times stock",
        "middle half",
    )
    lines = []
    for name, row in rows.items():
        cells = [name]
        for kind in ("", "cpu_"):
            middle, low, high = row[f"{kind}ratio"]
            cells += [
                f"{1e3 * row[f'{kind}seconds']:.2f}",
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
            ]
        lines.append(cells)
    return Table(header, lines)
