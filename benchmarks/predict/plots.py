"""Plots of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pictures import figure
from benchmarks.predict.jobs import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", "-.", ":")


def throughput(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plots images per second over workers, with a curve for each codec and exchange.

    Args:
        rows: the predictions.
        path: the file to write; its suffix determines the format.
        title: the title of the plot.
    """
    with figure(path, font=10, size=(8, 5)) as ((axes,),):
        draw(axes, rows)
        axes.legend()
        axes.set_title(title)


def draw(axes: Axes, rows: Sequence[Row]) -> None:
    """Plots the curves into axes, faint where the exchange would refuse the number of workers."""
    curves = dict.fromkeys((row.codec, row.exchange) for row in rows)
    for index, (codec, exchange) in enumerate(curves):
        mine = [row for row in rows if (row.codec, row.exchange) == (codec, exchange)]
        able = [row for row in mine if not row.refused]
        # Begins with the last row that is not refused, so that the curve has no gap.
        unable = [*able[-1:], *(row for row in mine if row.refused)]
        style = STYLES[index % len(STYLES)]
        label = f"{codec}, {exchange}"
        for part, alpha, shown in ((able, 1.0, label), (unable, 0.3, "_hidden")):
            axes.plot(
                [row.workers for row in part],
                [row.images_per_second for row in part],
                style,
                color=f"C{index}",
                alpha=alpha,
                label=shown,
            )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="workers", ylabel="images a second")
    axes.grid(True, which="major", alpha=0.4)
