"""Trains choices in turns in one job, and compares each with stock in the same round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import compressions, data
from benchmarks.loop import Batch
from benchmarks.models import MODELS
from benchmarks.settings import Settings
from benchmarks.tables import Table

FIRST = 5
"""The number of steps at the start that are not counted: graphs are traced, names negotiated."""

Turn = Callable[[str, int], tuple[float, float]]
"""A function that makes steps with a choice, and returns the wall-clock and processor seconds of a step."""


class Sessions:
    """The models, optimizers and compressors of all choices on one rank, and one batch for all steps.

    Args:
        trainer: the trainer of a framework.
        settings: the settings of all trainings, with a constant learning rate.
        names: the choices.

    Attributes:
        of: the session of each choice.
    """

    def __init__(self, trainer: Any, settings: Settings, names: Sequence[str]) -> None:
        model = MODELS[settings.model]
        images = data.load(model)
        rows = np.arange(settings.batch_size) + settings.batch_size * trainer.rank
        rows %= len(images.train.labels)
        self._batch: Batch = images.train.load(rows), images.train.labels[rows]
        self._rate, self._trainer = settings.lr, trainer
        self.of: dict[str, Any] = {
            name: trainer.start(
                settings, images.classes, compressions.parse(name, {}, model.last_layer), seed=0
            )
            for name in names
        }

    def train(self, name: str, steps: int) -> np.ndarray:
        """Makes steps with a choice, which all ranks begin together.

        Returns:
            The wall-clock and processor seconds of each step, shape=(steps, 2).
        """
        self._trainer.gather(np.zeros(1))
        ends = [_now()]
        self.of[name].train(
            [self._batch] * steps, [self._rate] * steps, lambda loss: ends.append(_now())
        )
        return np.diff(np.array(ends), axis=0)


def order(names: Sequence[str], number: int) -> Sequence[str]:
    """The order of the choices in a round.

    Every other round is in reverse, so that slow changes of the machine favour no choice.

    Args:
        names: the choices.
        number: the number of the round.
    """
    return names[:: -1 if number % 2 else 1]


def measure(turn: Turn, names: Sequence[str], rounds: int, block: int) -> np.ndarray:
    """Measures all choices in turns.

    Args:
        turn: the function to call with every choice in each round.
        names: the choices.
        rounds: the number of rounds.
        block: the number of steps of a choice in a round.

    Returns:
        The wall-clock and processor seconds of a step, shape=(choices, rounds, 2).
    """
    for name in names:
        turn(name, FIRST)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in tqdm(range(rounds), unit="round", disable=not sys.stderr.isatty()):
        for name in order(names, number):
            seconds[name].append(turn(name, block))
    return np.array([seconds[name] for name in names])


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def row(seconds: np.ndarray, stock: np.ndarray) -> dict[str, Any]:
    """A choice's results: medians over rounds of both times, and quartiles of their ratios to stock's."""
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
    """A table with one line for each choice."""
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
