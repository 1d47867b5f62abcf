"""A transformer's step times by the rate of the link: a picture and a table of docs/performance.md."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.pages.reading import record
from benchmarks.pictures import figure
from benchmarks.plots import COLORS
from benchmarks.tables import Table

LINKS = {
    "50mbit": 50,
    "100mbit": 100,
    "200mbit": 200,
    "500mbit": 500,
    "1gbit": 1000,
    "none": math.inf,
}
"""The rates of the records' links, in Mbit/s."""

SHOWN = {
    "none": ("no compression", "o"),
    "fp16": ("fp16", "P"),
    "bf16": ("bf16", "s"),
    "powersgd:rank=4,warmup_steps=2": ("PowerSGD hook, rank 4", "v"),
    "onebit": ("1-bit", "^"),
    "int8": ("int8", "D"),
    "auto": ("Auto", None),
}
"""The labels and markers of the compressions."""

_NO_LIMIT = 3500
"""The position of "no limit" on the axis."""

Times = dict[str, list[float]]
"""The seconds of a step by compression, one number for each link."""


def seconds() -> Times:
    """The median seconds over the rounds of each record."""
    records = [record(f"lab-ddp-gpt-{link}") for link in LINKS]
    return {name: [median(one["seconds"][name]) for one in records] for name in SHOWN}


def crossing(name: str, times: Times) -> float | None:
    """The rate in Mbit/s up to which a choice is faster than no compression, interpolated in logarithms.

    None if the choice is slower even on the slowest link; infinite if it is faster without a limit.
    """
    gains = [math.log(none / own) for none, own in zip(times["none"], times[name], strict=True)]
    if gains[0] <= 0:
        return None
    for (before, after), (low, high) in zip(
        itertools.pairwise(gains), itertools.pairwise(LINKS.values()), strict=True
    ):
        if after <= 0:
            if math.isinf(high):
                return low
            share = before / (before - after)
            return math.exp(math.log(low) + share * math.log(high / low))
    return math.inf


def table(times: Times | None = None) -> Table:
    """A line for each choice: milliseconds of a step, and the rate up to which it beats no compression."""
    times = times or seconds()
    header = ("ms a step", *map(shown, LINKS.values()), "faster than none up to")
    rows = [
        [SHOWN[name][0], *(f"{1e3 * one:.0f}" for one in own), _up_to(name, times)]
        for name, own in times.items()
    ]
    return Table(header, rows)


def draw(path: Path) -> None:
    """Writes the picture."""
    times = seconds()
    with figure(path, font=10, size=(4.95, 4.8)) as ((axes,),):
        places = [min(link, _NO_LIMIT) for link in LINKS.values()]
        for (name, (label, marker)), color in zip(SHOWN.items(), COLORS, strict=False):
            values = [1e3 * one for one in times[name]]
            look = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.6}
            if name == "auto":
                look.update(linewidth=7, alpha=0.35, zorder=1)
            axes.plot(places[:-1], values[:-1], label=label, **look)
            # The axis is broken before "no limit".
            axes.plot(places[-2:], values[-2:], linestyle="-" if name == "auto" else ":", **look)
        crossings = _crossings(times)
        if crossings:
            axes.plot(
                [rate for rate, _ in crossings],
                [milliseconds for _, milliseconds in crossings],
                linestyle="",
                marker="o",
                markersize=11,
                markerfacecolor="none",
                markeredgecolor="0.3",
                label="as fast as no compression",
            )
        axes.set(
            xscale="log",
            yscale="log",
            ylabel="milliseconds a step",
            xlabel="rate of each host's link, Mbit/s",
        )
        axes.set_xticks(
            places, ["no limit" if math.isinf(link) else f"{link:g}" for link in LINKS.values()]
        )
        axes.tick_params(axis="x", which="minor", bottom=False)
        low, high = axes.get_ylim()
        ticks = [tick for tick in (20, 30, 50, 70, 100, 200, 300, 500, 700) if low < tick < high]
        axes.set_yticks(ticks, map(str, ticks))
        axes.tick_params(axis="y", which="minor", left=False, labelleft=False)
        axes.grid(True, which="major", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        axes.set_title("A small transformer under DDP on two hosts", loc="left")


def _crossings(times: Times) -> list[tuple[float, float]]:
    """The rates at which choices are as fast as no compression, with the milliseconds of a step there."""
    links = [math.log(link) for link in LINKS.values() if not math.isinf(link)]
    none = [math.log(1e3 * one) for one in times["none"]][: len(links)]
    rates = [crossing(name, times) for name in times if name not in ("none", "auto")]
    inside = [rate for rate in rates if rate and rate < max(map(math.exp, links)) * 0.999]
    return [(rate, math.exp(float(np.interp(math.log(rate), links, none)))) for rate in inside]


def shown(rate: float) -> str:
    """A rate in Mbit/s as the pages write it."""
    if math.isinf(rate):
        return "no limit"
    return f"{rate:g} Mbit/s" if rate < 1000 else f"{rate / 1000:g} Gbit/s"


def _up_to(name: str, times: Times) -> str:
    if name in ("none", "auto"):
        return ""
    rate = crossing(name, times)
    if rate is None:
        return "nowhere"
    return "any" if math.isinf(rate) else shown(float(f"{rate:.2g}"))
