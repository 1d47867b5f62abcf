"""Draws the picture of the frontier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.frontier.points import Point, by_optimizer, points
from benchmarks.frontier.tasks import Measure
from benchmarks.papers.experiment import Row
from benchmarks.pictures import figure
from benchmarks.plots import COLORS

_FAMILIES = {
    "none": ("uncompressed, casts", COLORS[0], "s"),
    "bf16": ("uncompressed, casts", COLORS[0], "s"),
    "fp16": ("uncompressed, casts", COLORS[0], "s"),
    "int8": ("8-bit", COLORS[1], "D"),
    "ecq": ("ECQ", COLORS[2], "o"),
    "qsgd": ("QSGD", COLORS[6], "o"),
    "ternary": ("ternary", COLORS[4], "^"),
    "onebit": ("1-bit", COLORS[3], "v"),
    "topk": ("top-k", COLORS[5], "P"),
    "ef21-sgdm": ("EF21 *", "0.45", "X"),
    "signum": ("Signum *", "0.45", "*"),
    "signum-32": ("Signum *", "0.45", "*"),
    "powersgd": ("PowerSGD", COLORS[5], "p"),
}
"""Labels, colours and markers by the beginning of a method's name; grey is for other methods."""


_TITLES = {"adamw": "AdamW", "momentum": "SGD with momentum", "muon": "Muon"}


def draw(measure: Measure, rows: list[Row], path: Path) -> None:
    """Draws means with 95% intervals over bits per element, and the frontier as a line.

    With several optimizers, each has a panel, with the differences to its uncompressed runs.
    """
    optimizers = by_optimizer(rows)
    size = (8.2, 5.0) if len(optimizers) == 1 else (6.0, 2.4 * len(optimizers))
    with figure(path, rows=len(optimizers), size=size, sharex=True, sharey=True) as axes:
        for (optimizer, own), plot in zip(optimizers.items(), axes[:, 0], strict=True):
            found = [one for one in points(own, measure) if one.value is not None]
            if len(optimizers) > 1:
                found = [replace(one, value=one.difference) for one in found]
                plot.set_title(_TITLES[optimizer])
            _panel(plot, found, measure)
            plot.label_outer()
        _legend(axes[0][0], measure)
        relative = ", difference to uncompressed" if len(optimizers) > 1 else ""
        axes[0][0].figure.supylabel(measure.unit + relative, fontsize="medium")


def _panel(plot: Any, found: list[Point], measure: Measure) -> None:
    sign = measure.sign
    best = [one for one in reversed(found) if one.best]
    most = max(one.bits for one in found)
    # The best value with at most so many bits.
    plot.step(
        [*(one.bits for one in best), most],
        [*(_mean(one) for one in best), _mean(best[-1])],
        where="post",
        color="0.75",
        lw=1.2,
        zorder=1,
    )
    ring = [one.bits for one in best], [_mean(one) for one in best]
    plot.plot(*ring, "o", ms=12, mfc="none", mec="0.4", ls="none", label="on the frontier")
    for family, (label, color, marker) in _FAMILIES.items():
        own = [one for one in found if one.method.partition(":")[0].partition("+")[0] == family]
        if own:
            known = plot.get_legend_handles_labels()[1]
            plot.errorbar(
                [one.bits for one in own],
                [_mean(one) for one in own],
                yerr=[one.value.half_width for one in own if one.value is not None],
                fmt=marker,
                color=color,
                ms=6,
                lw=1,
                capsize=2,
                label=None if label in known else label,
            )
    edge = sign * max(sign * _mean(one) for one in found) - sign * measure.shown
    arrow = "↓" if sign > 0 else "↑"
    for one in found:
        if sign * _mean(one) < sign * edge:
            text = f"{arrow} {_mean(one):.3g} {one.method}"
            plot.annotate(
                text, (one.bits, edge), (-4, 4 * sign), textcoords="offset points", ha="right"
            )
    plot.set_ylim(**{"bottom" if sign > 0 else "top": edge})
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter("{x:g}")
    plot.set(xlabel="bits an encoded element")
    plot.grid(alpha=0.3)


def _legend(plot: Any, measure: Measure) -> None:
    others = any("*" in label for label in plot.get_legend_handles_labels()[1])
    plot.legend(
        frameon=False,
        ncols=2,
        loc="lower right" if measure.sign > 0 else "upper right",
        title="* not of this package" if others else None,
    )


def _mean(one: Point) -> float:
    assert one.value is not None
    return one.value.mean
