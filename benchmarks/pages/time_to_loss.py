"""When trainings of several seeds reach a loss: steps, and seconds by the lab's clocks.

A loss depends on the seed and the step, and not on the link: runs of several seeds, on any link, tell
the steps. A run on each link tells what time it is at a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks import results
from benchmarks.intervals import mean
from benchmarks.pages.reading import RECORDS, label, ratio
from benchmarks.results import Point, Run
from benchmarks.tables import Table

TARGET = 3.3
"""Bits a byte of training text, which every choice reaches."""
_LOSSES = "train-text-losses"
_LINKS = {"100 Mbit/s": "lab-text-100mbit", "1 Gbit/s": "lab-text-1gbit"}


def steps_to(curve: Sequence[Point], loss: float) -> float:
    """The first step with a loss, interpolated between the points of a curve.

    Raises:
        ValueError: the curve ends above the loss.
    """
    above = None
    for point in curve:
        if point.loss <= loss:
            if above is None:
                return point.step
            part = (above.loss - loss) / (above.loss - point.loss)
            return above.step + part * (point.step - above.step)
        above = point
    raise ValueError(f"expected a loss of {loss:.3f} or less, got {curve[-1].loss:.3f} at the end")


def seconds_at(curve: Sequence[Point], steps: float) -> float:
    """The time on a run's clock after a number of steps, interpolated."""
    points = [(0.0, 0.0)]
    points += [(float(one.step), one.seconds) for one in curve if one.seconds is not None]
    at, seconds = np.array(points).T
    return float(np.interp(steps, at, seconds))


def table() -> Table:
    """Means over the seeds, and 95% intervals of the time as a share of uncompressed training's."""
    losses = results.read(RECORDS / f"{_LOSSES}.json").runs
    clocks = [
        {run.compression: run.curve for run in results.read(RECORDS / f"{name}.json").runs}
        for name in _LINKS.values()
    ]
    steps = {name: _steps(losses, name) for name in clocks[0]}
    lines = []
    for name, counts in steps.items():
        cells = [label(name), str(len(counts)), f"{np.mean(counts):.0f}"]
        for clock in clocks:
            seconds, plain = (
                np.array([*map(partial(seconds_at, clock[one]), steps[one])])
                for one in (name, "none")
            )
            share = mean(seconds / plain)
            shown = ratio((share.mean, share.low, share.high))
            cells += [f"{seconds.mean():.1f}", "" if name == "none" else shown]
        lines.append(tuple(cells))
    links = [cell for link in _LINKS for cell in (f"{link}, s", "of none's")]
    return Table(("compression", "seeds", f"steps to {TARGET} bits", *links), lines)


def _steps(runs: Sequence[Run], compression: str) -> list[float]:
    chosen = sorted((r for r in runs if r.compression == compression), key=lambda run: run.seed)
    return [steps_to(run.curve, TARGET * math.log(2)) for run in chosen]
