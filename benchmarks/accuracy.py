"""Compares trainings with and without compression from the same seeds, on images or on text."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import json_files, launch, recipes, report, results, trainers
from benchmarks.command_line import Parser, compression, positive
from benchmarks.compressions import STOCK
from benchmarks.intervals import paired
from benchmarks.recipes import Recipe
from benchmarks.results import Results, Run
from benchmarks.tables import Table, si_bytes

BASELINE = "none"
COMPRESSIONS = [
    "onebit",
    "onebit:group=column",
    "onebit:alpha=0",
    "int8",
    "ternary",
    "ecq",
]
"""The default compressions: 1-bit SGD with contiguous groups, the paper's columns, and without feedback."""
SCHEMA = "hvd_compress/accuracy/1"
FIRST_SEED = 100
"""The smallest seed; recipes were chosen on smaller ones."""


def arguments(
    recipe: Recipe,
    framework: str,
    json: Path,
    compressions: list[str],
    seeds: int,
    ranks: int = recipes.RANKS,
) -> list[str]:
    """The command line of ``benchmarks.train`` for the trainings that the file lacks."""
    return [
        *recipe.arguments(framework, json, compressions, ranks),
        *("--seed", str(FIRST_SEED), "--seeds", str(seeds)),
        *("--test-at-end", "--resume", "--quiet"),
    ]


def compare(outcome: Results, recipe: Recipe, baseline: str = BASELINE) -> list[dict[str, Any]]:
    """One row for each compression: its mean and its difference to the baseline, paired by seed."""
    runs = report.by_compression(outcome)

    def measured(run: Run) -> float:
        return recipe.scale * float(getattr(run, recipe.measure))

    control = {run.seed: measured(run) for run in runs[baseline]}
    rows = []
    for name, made in runs.items():
        pairs = [(measured(run), control[run.seed]) for run in made if run.seed in control]
        treated, untreated = zip(*pairs, strict=True)
        interval = paired(treated, untreated)
        rows.append(
            {
                "compression": name,
                "seeds": len(pairs),
                recipe.measure: statistics.fmean(treated),
                "by_seed": {str(run.seed): measured(run) for run in made if run.seed in control},
                "difference": interval.mean,
                "low": interval.low,
                "high": interval.high,
                "message_bytes_per_step": statistics.fmean(r.message_bytes_per_step for r in made),
                "parameters_identical": all(run.parameters_identical is not False for run in made),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], recipe: Recipe, baseline: str = BASELINE) -> Table:
    """The comparison as a table."""
    header = (
        "compression",
        "seeds",
        recipe.measure.replace("_", " "),
        f"difference to {baseline}",
        "95% interval",
        "bytes a step",
        "ranks agree",
    )
    places = recipe.digits
    percent = "%" if recipe.scale == 100 else ""
    return Table(
        header,
        [
            [
                row["compression"],
                str(row["seeds"]),
                f"{row[recipe.measure]:.{places}f}{percent}",
                f"{row['difference']:+.{places}f}",
                f"{row['low']:+.{places}f} to {row['high']:+.{places}f}",
                si_bytes(row["message_bytes_per_step"]),
                "yes" if row["parameters_identical"] else "NO",
            ]
            for row in rows
        ],
    )


def main(command_line: list[str] | None = None) -> int:
    """Makes the trainings that the output folder lacks, then compares them."""
    parser = Parser(
        prog="python -m benchmarks.accuracy",
        description=f"{__doc__} If started again, it continues where it stopped.",
    )
    parser.add_argument("--framework", choices=trainers.FRAMEWORKS, default=trainers.FRAMEWORKS[0])
    parser.add_argument("--recipe", choices=tuple(recipes.RECIPES), default="digits",
        help="LeNet on digits, or a transformer on text; default: digits")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/accuracy"), help="a folder")
    parser.add_argument("--seeds", type=several, default=30)
    parser.add_argument(
        "--compression", nargs="+", type=compression, default=COMPRESSIONS, metavar="NAME"
    )
    parser.add_argument("--baseline", type=compression, metavar="NAME",
        help=f"default: {BASELINE}, but with diloco {STOCK}, DDP's exchange in every step")  # fmt: skip
    parser.add_argument("--ranks", type=positive, default=recipes.RANKS,
        help="ranks that share this machine, or a host; with fsdp, replicas; default: 2")  # fmt: skip
    parser.add_argument("--shards", type=positive, default=1,
        help="with fsdp: ranks of each replica; default: 1")  # fmt: skip
    parser.add_argument(
        "--hosts",
        type=positive,
        default=1,
        help="if more than 1: hosts of a lab (python -m benchmarks.lab); default: 1",
    )
    args = parser.parse_args(command_line)
    recipe = recipes.RECIPES[args.recipe]
    baseline = args.baseline or (STOCK if args.framework == "diloco" else BASELINE)
    ranks = args.hosts * args.shards * args.ranks
    if args.hosts > 1 < args.shards:
        parser.error(f"argument --shards: expected 1 with more than one host, got {args.shards}")
    runs = args.out / "runs.json"
    chosen = list(dict.fromkeys([baseline, *args.compression]))
    try:
        command = [
            *arguments(recipe, args.framework, runs, chosen, args.seeds, ranks),
            *("--shards", str(args.shards)),
        ]
        if args.hosts == 1:
            launch.horovodrun(ranks, "benchmarks.train", command)
        else:
            launch.lab(args.hosts, args.ranks, "benchmarks.train", command)
    except (ValueError, launch.RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcome = results.read(runs)
    rows = compare(outcome, recipe, baseline)
    summary = {
        "schema": SCHEMA,
        "configuration": outcome.configuration,
        "ranks": outcome.ranks,
        "versions": outcome.versions,
        "machine": outcome.machine,
        "unit": f"{recipe.unit}, paired by seed, 95% t interval",
        "baseline": baseline,
        "compressions": rows,
    }
    json_files.write(args.out / "accuracy.json", summary)
    shown = table(rows, recipe, baseline)
    (args.out / "accuracy.md").write_text(shown.markdown() + "\n")
    print(f"\n{shown.text()}\n\nwritten to {args.out}/accuracy.json and accuracy.md")
    return min(1, report.check(outcome))


def several(text: str) -> int:
    """Reads a number of seeds, as an argument type."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected 2 or more, for an interval, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
