"""Compares accuracy against bits per element, for every codec with several settings, and other methods.

``python -m benchmarks.frontier`` makes the trainings that the output folder lacks, prints a table and draws
a picture. If started again, it continues where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.frontier.experiment import EXPERIMENT
from benchmarks.papers.__main__ import make, on_data
from benchmarks.papers.training import DATA


def main(command_line: list[str] | None = None) -> int:
    """Trains, and writes ``frontier.json``, ``frontier.md`` and ``frontier.svg``."""
    parser = Parser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/frontier"), help="a folder")
    parser.add_argument("--full", action="store_true", help="15,000 steps instead of 200")
    parser.add_argument("--data", default=DATA, metavar="DATA",
        help=f"{DATA}, which is the default, digits, or a folder: MNIST, CIFAR-10, ImageNet")  # fmt: skip
    args = parser.parse_args(command_line)
    json = args.out / "frontier.json"
    try:
        record = make(on_data(EXPERIMENT, args.data), json, full=args.full, resume=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shown = EXPERIMENT.table(record.rows)
    (args.out / "frontier.md").write_text(shown.markdown() + "\n")
    assert EXPERIMENT.draw is not None
    EXPERIMENT.draw(record.rows, args.out / "frontier.svg")
    print(f"\n{shown.text()}\n\nwritten to {args.out}/frontier.json, frontier.md and frontier.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
