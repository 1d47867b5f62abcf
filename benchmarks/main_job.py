"""Trains LeNet on handwritten digits with every codec, on two ranks; ``make train`` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import launch, plots, recipes, report, results, trainers
from benchmarks.command_line import Parser

COMPRESSIONS = ["none", "fp16", "onebit", "int8", "ternary", "ecq"]
SHORTER = ["--epochs", "20", "--lr", "0.02"]
"""Options for a shorter training than the accuracy benchmark's: one seed shows only that training works."""


def main(command_line: list[str] | None = None) -> int:
    """Trains, prints a table and draws the loss curves."""
    parser = Parser(prog="python -m benchmarks.main_job", description=__doc__)
    parser.add_argument("--framework", choices=trainers.FRAMEWORKS, default=trainers.FRAMEWORKS[0])
    parser.add_argument("--out", type=Path, default=Path("build/train"), help="a folder")
    args = parser.parse_args(command_line)
    json, png = args.out / "train.json", args.out / "loss.png"
    json.unlink(missing_ok=True)
    try:
        launch.horovodrun(
            recipes.RANKS,
            "benchmarks.train",
            [*recipes.DIGITS.arguments(args.framework, json, COMPRESSIONS), *SHORTER, "--quiet"],
        )
    except launch.RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcome = results.read(json)
    plots.loss_curves(outcome, png)
    print(f"\n{report.training_table(outcome).text()}\n\nloss curves: {png}\nnumbers: {json}")
    return min(1, report.check(outcome))


if __name__ == "__main__":
    sys.exit(main())
