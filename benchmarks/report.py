"""Tables and pictures of the JSON that ``benchmarks.train`` wrote."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import plots, results
from benchmarks.command_line import Parser
from benchmarks.results import Results, Run
from benchmarks.tables import Table, si_bytes

_ABSENT = "-"


def training_table(outcome: Results) -> Table:
    """One line a compression, means over its seeds; with the top-5 accuracy, if it was measured."""
    top5 = any(run.test_top5 is not None for run in outcome.runs)
    header = (
        "compression",
        "test accuracy",
        *(["top 5"] if top5 else []),
        "test bits",
        "bytes/step",
        "ratio",
        "wire bytes/step",
        "step ms",
        "codec ms",
        "residual",
        "ranks agree",
    )
    return Table(header, [_row(name, runs, top5) for name, runs in by_compression(outcome).items()])


def by_compression(outcome: Results) -> dict[str, list[Run]]:
    """The runs of every compression, in the order in which they first appear."""
    found: dict[str, list[Run]] = {}
    for run in outcome.runs:
        found.setdefault(run.compression, []).append(run)
    return found


def check(outcome: Results) -> int:
    """The number of runs after which the ranks' parameters differed, each one reported."""
    bad = [run for run in outcome.runs if run.parameters_identical is False]
    for run in bad:
        print(
            f"error: {run.compression}, seed {run.seed}: parameters differ between ranks",
            file=sys.stderr,
        )
    return len(bad)


def main(command_line: list[str] | None = None) -> int:
    """``python -m benchmarks.report FILE.json [--png OUT] [--markdown]``."""
    parser = Parser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--png", type=Path, help="draw the loss curves into this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(command_line)
    outcome = results.read(args.json)
    table = training_table(outcome)
    print(table.markdown() if args.markdown else table.text())
    if args.png:
        plots.loss_curves(outcome, args.png)
    return min(1, check(outcome))


def _row(name: str, runs: list[Run], top5: bool) -> list[str]:
    return [
        name,
        _mean(runs, lambda r: r.test_accuracy, lambda x: f"{100 * x:.2f}%"),
        *([_mean(runs, lambda r: r.test_top5, lambda x: f"{100 * x:.2f}%")] if top5 else []),
        _mean(runs, lambda r: r.test_bits, lambda x: f"{x:.3f}"),
        _mean(runs, lambda r: r.message_bytes_per_step, si_bytes),
        _mean(runs, lambda r: r.compression_ratio, lambda x: f"{x:.1f}"),
        _mean(runs, lambda r: r.wire_bytes_per_step, si_bytes),
        _mean(runs, lambda r: 1e3 * r.step_seconds.median, lambda x: f"{x:.2f}"),
        _mean(runs, lambda r: 1e3 * r.codec_seconds_per_step, lambda x: f"{x:.3f}"),
        _mean(runs, lambda r: r.residual_norm, lambda x: f"{x:.2g}"),
        _mean(runs, lambda r: r.parameters_identical, lambda same: "yes" if same == 1 else "NO"),
    ]


def _mean(
    runs: list[Run], value: Callable[[Run], float | None], show: Callable[[float], str]
) -> str:
    values = [v for run in runs if (v := value(run)) is not None]
    return show(statistics.fmean(values)) if values else _ABSENT


if __name__ == "__main__":
    sys.exit(main())
