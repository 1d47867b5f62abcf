"""Trains a small transformer on text, with each codec, until it is better than a table of n-grams.

Four ranks of one process share the windows of a step, and average by the package's default exchange.
``python -m benchmarks.trained --seeds 8`` makes the trainings that the output folder lacks, seed by seed,
and writes the record. It may be stopped at any time, and started again; several processes with the same
command share the work. ``--collect`` trains nothing, and writes the record of what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import json_files
from benchmarks.command_line import Parser, compression, positive
from benchmarks.trained import record, runs
from benchmarks.trained.lines import lines
from benchmarks.trained.training import Case, Recipe, Training

METHODS = (
    *(record.BASELINE, "int8", "qsgd", "powersgd:rank=16", "onebit"),
    *("fp16", "bf16", "topk", "powersgd:rank=4"),
)
"""Among them, the default of 4 bits (``qsgd``), and what people use without this package."""
FIRST_SEED = 100
"""The smallest seed; the recipe was chosen on another one."""


def cases(methods: list[str], seeds: int) -> list[Case]:
    """Uncompressed trainings and the first codec's seed by seed, then one codec after the other."""
    chosen = list(dict.fromkeys([record.BASELINE, *methods]))
    numbers = range(FIRST_SEED, FIRST_SEED + seeds)
    first = [Case(method, seed) for seed in numbers for method in chosen[:2]]
    return [*first, *(Case(method, seed) for method in chosen[2:] for seed in numbers)]


def main(command_line: list[str] | None = None, recipe: Recipe | None = None) -> int:
    """Trains, and writes the record, the table and the picture."""
    parser = Parser(
        prog="python -m benchmarks.trained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/trained"), help="a folder")
    parser.add_argument("--seeds", type=positive, default=8)
    parser.add_argument(
        "--compression", nargs="+", type=compression, default=METHODS, metavar="NAME"
    )
    parser.add_argument("--collect", action="store_true", help="train nothing")
    args = parser.parse_args(command_line)
    recipe = recipe or Recipe()
    wanted = cases(list(args.compression), args.seeds)
    try:
        if not args.collect:
            runs.make(args.out, recipe, wanted, _tell)
        done = runs.finished(args.out, recipe, wanted)
        command = f"python -m benchmarks.trained --seeds {args.seeds}"
        found = record.collect(recipe, done, _lines(args.out, recipe), command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    json_files.write(args.out / "trained.json", found)
    record.draw(found, args.out / "trained.svg")
    shown = record.table(found)
    (args.out / "trained.md").write_text(shown.markdown() + "\n")
    print(f"\n{shown.text()}\n\nwritten to {args.out}/trained.json, trained.md and trained.svg")
    return 0


def _tell(case: Case, training: Training) -> None:
    bits = f", {training.curve[-1]:.3f} bits a byte" if training.curve else ""
    print(f"{case.method}, seed {case.seed}: step {training.step}{bits}", flush=True)


def _lines(folder: Path, recipe: Recipe) -> dict[str, object]:
    """The tables and programs beside the model, made once."""
    path = folder / "lines.json"
    if not path.exists():
        json_files.write(path, lines(recipe, FIRST_SEED))
    found: dict[str, object] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
