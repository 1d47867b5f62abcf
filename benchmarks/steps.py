"""Measures training steps in TensorFlow with each compressor, in multiples of stock Horovod's.

``horovodrun --gloo -np 2 python -m benchmarks.steps --json OUT``

All choices train a few steps each, in turns, in one job. The time of a turn is the median of its steps on
the slowest rank, divided by that of stock Horovod in the same round. Other work on the machine lengthens
steps; their processor time, of all threads of a rank, is disturbed less.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from benchmarks import json_files, machine
from benchmarks.command_line import Parser, compression, positive
from benchmarks.compressions import LOCAL, STOCK
from benchmarks.models import MODELS
from benchmarks.settings import Settings
from benchmarks.trainers.tensorflow import start
from benchmarks.turns import Sessions, measure, row, table

SCHEMA = "hvd_compress/steps/1"
DEFAULT = [LOCAL, STOCK, "onebit", "int8"]

_SETTLING = 1
"""The number of steps at the start of a turn that are not timed."""


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; the first one prints and writes the results."""
    args = _parse(command_line)
    trainer = start(args.threads)
    names = list(dict.fromkeys([STOCK, *args.compression]))
    settings = Settings(args.model, batch_size=args.batch_size, lr=args.lr, threads=args.threads)
    sessions = Sessions(trainer, settings, names)

    def turn(name: str, steps: int) -> tuple[float, float]:
        """Makes steps with a choice; returns the slowest rank's median seconds and mean processor time."""
        seconds = sessions.train(name, steps + _SETTLING)[_SETTLING:]
        own = np.array([np.median(seconds[:, 0]), seconds[:, 1].mean()])
        wall, cpu = trainer.gather(own).max(0).tolist()
        return wall, cpu

    seconds = measure(turn, names, args.rounds, args.block)
    record = {
        "schema": SCHEMA,
        "ranks": trainer.size,
        "configuration": dataclasses.asdict(settings),
        "steps_a_turn": args.block,
        "rounds": args.rounds,
        "versions": machine.versions(),
        "machine": machine.description(),
        "rows": {name: row(one, seconds[0]) for name, one in zip(names, seconds, strict=True)},
    }
    if trainer.rank == 0:
        json_files.write(args.json, record)
        shown = table(record["rows"])
        print(shown.markdown() if args.markdown else shown.text())
    if args.profile:
        for name in names:
            tf.profiler.experimental.start(str(args.profile / f"rank-{trainer.rank}" / name))
            turn(name, args.block)
            tf.profiler.experimental.stop()
    return 0


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--model", choices=tuple(MODELS), default="resnet20")
    add("--batch-size", type=positive, default=8, help="images a rank and step; default: 8")
    add("--lr", type=float, default=0.001, help="default: 0.001")
    add("--threads", type=positive, default=1, help="threads a rank; default: 1")
    add("--compression", nargs="+", type=compression, default=DEFAULT, metavar="NAME[:key=value,...]",
        help=f"besides {STOCK}; default: {' '.join(DEFAULT)}")  # fmt: skip
    add(
        "--block", type=positive, default=10, help="timed steps of a choice in a round; default: 10"
    )
    add("--rounds", type=positive, default=20, help="default: 20")
    add("--profile", type=Path, metavar="FOLDER", help="also write TensorFlow's profiles")
    add("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
