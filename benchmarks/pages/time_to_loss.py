"""The time of a training to a useful loss: steps of several seeds, times the seconds of a step.

A loss depends on the seed and the step, and not on the link. So ``benchmarks.trained`` tells the steps, and
turns in one job on each link tell the seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.intervals import mean
from benchmarks.pages.reading import RECORDS, label, ratio, record
from benchmarks.pictures import figure
from benchmarks.plots import style
from benchmarks.tables import Table
from benchmarks.trained import record as trained

TARGET = 2.4
"""Bits a byte of test text: less than a table of order 2 has."""
LINKS = {"100 Mbit/s": "lab-time-to-loss-100mbit", "1 Gbit/s": "lab-time-to-loss-1gbit"}


@dataclass(frozen=True)
class Method:
    """The steps and the step times of a method.

    Attributes:
        steps: the steps to the loss by seed; empty where one of the seeds did not reach it.
        seconds: by link, the seconds of a step in each round.
    """

    steps: Mapping[int, float]
    seconds: Mapping[str, Sequence[float]]

    def time(self, link: str) -> float:
        """The seconds to the loss on a link: the mean of the steps, times the median of the seconds."""
        return fmean(self.steps.values()) * median(self.seconds[link])

    def share(self, baseline: Method, link: str) -> tuple[float, float, float]:
        """The time as a share of another method's, and its 95% interval.

        The geometric mean of the steps' ratios by seed, times that of the seconds' ratios by round. Half
        widths of the two intervals, of logarithms, add up in squares.
        """
        seeds = sorted(self.steps.keys() & baseline.steps.keys())
        steps = np.divide(
            [self.steps[seed] for seed in seeds], [baseline.steps[seed] for seed in seeds]
        )
        seconds = np.divide(self.seconds[link], baseline.seconds[link])
        parts = [mean(np.log(one)) for one in (steps, seconds)]
        middle = sum(part.mean for part in parts)
        width = math.hypot(*(part.half_width for part in parts))
        low, own, high = np.exp([middle - width, middle, middle + width]).tolist()
        return own, low, high


def steps_to(curve: Sequence[float], steps: int, bits: float) -> float | None:
    """The step at which a loss is reached, interpolated; None where it is not.

    Args:
        curve: the losses at points of equal distance, the last of which is the end of the training.
        steps: the steps of the training.
        bits: the loss.
    """
    distance = steps / len(curve)
    for number, own in enumerate(curve):
        if own <= bits:
            before = curve[number - 1] if number else own
            part = (before - bits) / (before - own) if before > own else 1.0
            return distance * (number + part)
    return None


def methods(
    losses: Mapping[str, Any] | None = None, clocks: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Method]:
    """The methods that have both losses of several seeds and seconds on each link."""
    losses = losses or trained.read(RECORDS / "trained.json")
    clocks = clocks or {link: record(name) for link, name in LINKS.items()}
    found = {}
    for method, results in trained.by_method(losses).items():
        if len(results) < 2 or any(method not in one["seconds"] for one in clocks.values()):
            continue
        length = losses["recipe"]["steps"]
        reached = {seed: steps_to(one["curve"], length, TARGET) for seed, one in results.items()}
        steps = {seed: own for seed, own in reached.items() if own is not None}
        seconds = {link: one["seconds"][method] for link, one in clocks.items()}
        found[method] = Method(steps if len(steps) == len(reached) else {}, seconds)
    return found


def table(found: Mapping[str, Method] | None = None) -> Table:
    """A line for each method: the steps, and on each link the time and its share of no compression's."""
    found = found or methods()
    baseline = found[trained.BASELINE]
    lines = []
    for method, own in found.items():
        if not own.steps:
            lines.append([label(method), "", "not reached", *[""] * (2 * len(LINKS))])
            continue
        cells = [label(method), str(len(own.steps)), f"{fmean(own.steps.values()):,.0f}"]
        for link in LINKS:
            share = "" if own is baseline else ratio(own.share(baseline, link))
            cells += [f"{own.time(link):.0f}", share]
        lines.append(cells)
    links = [cell for link in LINKS for cell in (f"{link}, s", "of none's")]
    return Table(("compression", "seeds", f"steps to {TARGET} bits", *links), lines)


def draw(path: Path) -> None:
    """Draws each method's time as a share of no compression's, with its interval, by link."""
    found = methods()
    baseline = found[trained.BASELINE]
    shown = [name for name, own in found.items() if own.steps and own is not baseline]
    with figure(path, columns=len(LINKS), size=(9.0, 0.9 + 0.36 * len(shown))) as axes:
        for each, link in zip(axes[0], LINKS, strict=True):
            each.axvline(1, color="0.6", lw=0.8)
            for place, name in enumerate(shown):
                own, low, high = found[name].share(baseline, link)
                color = style(1 + place)["color"]
                ends = [[own - low], [high - own]]
                each.errorbar([own], [place], xerr=ends, fmt="o", color=color, capsize=3, ms=5)
            each.set(title=link, xlabel=f"time to {TARGET} bits, none = 1", xlim=(0, None))
            each.set_yticks(range(len(shown)), shown if each is axes[0][0] else [""] * len(shown))
            each.set_ylim(len(shown) - 0.5, -0.5)
