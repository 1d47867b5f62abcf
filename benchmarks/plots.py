"""Draws loss curves: ``python -m benchmarks.plots RECORD.json ... --out PICTURE.svg``.

For records of one recipe on several links, it draws the training loss over wall time, in a panel for each
link, and over the bytes that a rank has sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.command_line import Parser
from benchmarks.pictures import figure
from benchmarks.results import Results, Run

COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
"""Colours that people with any colour vision can distinguish (Okabe and Ito)."""
_LINES = ("-", "--", "-.", (0, (1, 1)))


def style(number: int) -> dict[str, Any]:
    """The colour and the line style of a picture's curve, by its number."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": _LINES[number % len(_LINES)]}


def loss_curves(outcome: Results, path: Path) -> None:
    """Draws the training loss over steps and over bytes sent, means over the seeds."""
    with _panels(path, 2, (12, 4.8)) as (over_steps, over_bytes):
        _lines(over_steps, outcome, lambda run: [point.step for point in run.curve])
        _lines(over_bytes, outcome, _megabytes)
        over_steps.set(xlabel="step", ylabel="training loss (cross entropy)", yscale="log")
        over_bytes.set(xlabel="megabytes a rank has sent", xscale="log")
        over_steps.legend(title="compression")
        what = outcome.configuration
        over_steps.figure.suptitle(
            f"{what['model']} on {what['data']}, {what['framework']}, {outcome.ranks} ranks, "
            f"{what['batch_size']} samples a rank and step"
        )


def text_loss(outcomes: Sequence[Results], path: Path) -> None:
    """Draws the training loss of a text in bits a byte, over wall time for each link, and over bytes sent.

    Raises:
        ValueError: a record lacks the times or bytes of its curves.
    """
    for outcome in outcomes:
        if any(point.seconds is None for run in outcome.runs for point in run.curve):
            raise ValueError(
                "expected records whose curves have seconds and bytes, got one without: train again"
            )
    with _panels(path, len(outcomes) + 1, (3.4 * (len(outcomes) + 1), 3.9)) as panels:
        *over_time, over_bytes = panels
        for axes, outcome in zip(over_time, outcomes, strict=True):
            _lines(axes, outcome, lambda run: [p.seconds or 0.0 for p in run.curve], math.log(2))
            axes.set(xlabel="seconds of training", xlim=(0, None), title=_link(outcome))
        # The bytes that are sent do not depend on the link.
        _lines(over_bytes, outcomes[0], _megabytes, math.log(2))
        over_bytes.set(xlabel="megabytes a rank has sent", xscale="log", title="any link")
        over_time[0].set(ylabel="training loss, bits a byte")
        handles, labels = over_bytes.get_legend_handles_labels()
        over_bytes.figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels), frameon=False
        )


def main(command_line: list[str] | None = None) -> int:
    """Reads the records and writes the picture."""
    parser = Parser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="files of benchmarks.train")
    parser.add_argument("--out", type=Path, required=True, help="a file with .svg or .png")
    args = parser.parse_args(command_line)
    try:
        text_loss([results.read(path) for path in args.records], args.out)
    except ValueError as error:
        parser.error(str(error))
    return 0


@contextmanager
def _panels(path: Path, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Panels with one y-axis, which are written to a file at the end of the block."""
    with figure(path, 1, columns, font=10, size=size, sharey=True) as ((*panels,),):
        yield panels
        for axes in panels:
            axes.grid(True, which="major", alpha=0.4)
            axes.spines[["top", "right"]].set_visible(False)


def _lines(
    axes: Any,
    outcome: Results,
    place: Callable[[Run], Any],
    unit: float = 1.0,
) -> None:
    """Draws a line for each compression, means over its seeds, with losses in units of ``unit`` nats."""
    for number, name in enumerate(dict.fromkeys(run.compression for run in outcome.runs)):
        runs = [run for run in outcome.runs if run.compression == name]
        if runs[0].message_bytes_per_step or place is not _megabytes:
            loss = np.mean([[point.loss for point in run.curve] for run in runs], axis=0)
            x = np.mean([place(run) for run in runs], axis=0)
            axes.plot(x, loss / unit, label=name, **style(number))


def _megabytes(run: Run) -> np.ndarray:
    sent = [p.wire_bytes for p in run.curve]
    if None in sent:  # An older file, which has only the mean bytes per step.
        sent = [p.step * run.wire_bytes_per_step for p in run.curve]
    return np.array(sent, np.float64) / 1e6


def _link(outcome: Results) -> str:
    link = outcome.network.get("link")
    if link in (None, "none"):
        return "no limit"
    return str(link).replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


if __name__ == "__main__":
    sys.exit(main())
