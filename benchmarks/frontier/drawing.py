"""Draws the picture of the frontier."""

from __future__ import annotations

from pathlib import Path

from benchmarks.frontier.points import Point, points
from benchmarks.papers.drawing import figure
from benchmarks.papers.experiment import Row
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

_SHOWN = 18
"""The range of accuracies below the best in points; worse methods are named at the picture's edge."""


def draw(rows: list[Row], path: Path) -> None:
    """Draws mean test accuracies with 95% intervals over bits per element, and the frontier as a line."""
    found = [one for one in points(rows) if one.accuracy is not None]
    best = [one for one in reversed(found) if one.best]
    most = max(one.bits for one in found)
    with figure(path, size=(8.2, 5.0)) as axes:
        (plot,) = axes[0]
        # The best accuracy with at most so many bits.
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
                    yerr=[one.accuracy.half_width for one in own if one.accuracy is not None],
                    fmt=marker,
                    color=color,
                    ms=6,
                    lw=1,
                    capsize=2,
                    label=None if label in known else label,
                )
        lowest = max(map(_mean, found)) - _SHOWN
        for one in found:
            if _mean(one) < lowest:
                text = f"↓ {_mean(one):.0f}% {one.method}"
                plot.annotate(
                    text, (one.bits, lowest), (-4, 4), textcoords="offset points", ha="right"
                )
        plot.set_ylim(bottom=lowest)
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter("{x:g}")
        plot.set(xlabel="bits an encoded element", ylabel="test accuracy, %")
        plot.grid(alpha=0.3)
        plot.legend(frameon=False, ncols=2, loc="lower right", title="* not of this package")


def _mean(one: Point) -> float:
    assert one.accuracy is not None
    return one.accuracy.mean
