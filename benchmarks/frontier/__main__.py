"""Compares accuracy against bits per element, for every codec with several settings, and other methods.

``python -m benchmarks.frontier --task TASK`` makes the trainings that the output folder lacks, prints
tables and draws a picture. If started again, it continues where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.frontier.experiment import EXPERIMENTS, equal_bits
from benchmarks.frontier.tasks import TASKS
from benchmarks.papers.__main__ import make, on_data
from benchmarks.papers.training import DATA


def main(command_line: list[str] | None = None) -> int:
    """Trains, and writes a record, tables and a picture."""
    parser = Parser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/frontier"), help="a folder")
    parser.add_argument("--task", choices=tuple(TASKS), default="lenet",
        help="LeNet on MNIST, ResNet-20 on digits, or a transformer on text; default: lenet")  # fmt: skip
    parser.add_argument("--full", action="store_true", help="10 and more times as many steps")
    parser.add_argument("--data", metavar="DATA",
        help=f"{DATA}, digits, or a folder of MNIST, CIFAR-10 or ImageNet; or text")  # fmt: skip
    args = parser.parse_args(command_line)
    task, experiment = TASKS[args.task], EXPERIMENTS[args.task]
    name = args.out / experiment.name
    json = name.with_suffix(".json")
    try:
        if args.data:
            experiment = on_data(experiment, args.data)
        record = make(experiment, json, full=args.full, resume=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tables = [experiment.table(record.rows)]
    if len(task.optimizers) > 1:
        tables.append(equal_bits(task, record.rows))
    name.with_suffix(".md").write_text("\n".join(shown.markdown() + "\n" for shown in tables))
    assert experiment.draw is not None
    experiment.draw(record.rows, name.with_suffix(".svg"))
    for shown in tables:
        print(f"\n{shown.text()}")
    print(f"\nwritten to {name}.json, {name.name}.md and {name.name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
