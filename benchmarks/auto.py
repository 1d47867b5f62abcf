"""Compares the steps of ``Auto`` with those of fixed choices, in one job.

``python -m benchmarks.lab --hosts 4 --rate 1gbit -- python -m benchmarks.auto --json OUT``

First, ``Auto`` trains until its plan is settled. The cost of planning is the time of these steps beyond
that of as many steps with the plan. Then all choices train a few steps each, in turns, until the confidence
interval of the ratio of ``Auto``'s time to the best fixed choice's is narrow enough.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
from tqdm import tqdm

from benchmarks import compressions, data, json_files, machine, trainers, turns
from benchmarks.command_line import Parser, compression, positive
from benchmarks.compressions import AUTO
from benchmarks.intervals import paired
from benchmarks.loop import Batch
from benchmarks.models import MODELS
from benchmarks.settings import Settings
from benchmarks.tables import Table
from benchmarks.trainers.torch import TorchSession, TorchTrainer, start
from hvd_compress.engine.auto import Planning

SCHEMA = "hvd_compress/auto/2"
FRAMEWORKS = ("torch", "ddp")
UNCOMPRESSED = ("none", "fp16")
FIXED = [
    *UNCOMPRESSED,
    "int8:exchange=allgather",
    "onebit:exchange=allgather",
    "onebit:exchange=two_shot",
]

_FIRST = 3
"""The steps at the start of a training that are not counted: memory is allocated, connections warm up."""

_SETTLING = 2
"""The steps at the start of a turn that are not timed: Horovod negotiates the tensors' names again."""

_FEWEST_ROUNDS = 2
"""The smallest number of rounds, even if time is up: an interval needs two."""

_LEAST_ROUNDS = 4
"""The smallest number of rounds after which an interval is narrow enough to stop."""


@dataclass
class Contest:
    """The step times of all choices.

    Attributes:
        seconds: for each choice, the median seconds of a step in its turn of each round.
        processor: likewise, the mean processor seconds of a step on a rank, with those that are not timed.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)

    def best(self, names: Sequence[str], without: int | None = None) -> str:
        """The choice with the smallest median step time over all rounds, or all but the given one."""
        taken = np.arange(self.rounds) != without
        return min(names, key=lambda name: float(np.median(np.array(self.seconds[name])[taken])))

    @property
    def rounds(self) -> int:
        """The number of rounds so far."""
        return len(self.seconds[AUTO])

    def ratio(self, name: str) -> tuple[float, float, float]:
        """The ratio of ``Auto``'s time to a choice's: geometric mean over rounds, and 95% interval."""
        return self._ratio(self.seconds[name])

    def ratio_to_best(self, names: Sequence[str]) -> tuple[float, float, float]:
        """The ratio of ``Auto``'s time to the best choice's: geometric mean, and 95% interval.

        In each round, ``Auto`` is compared with the choice that was best in the other rounds. The best
        choice of all rounds, among equally good ones, would be best by chance in these very rounds.
        """
        chosen = (self.best(names, number) for number in range(self.rounds))
        return self._ratio([self.seconds[name][number] for number, name in enumerate(chosen)])

    def enough(self, fixed: Sequence[str], width: float) -> bool:
        """Whether the interval of the ratio to the best fixed choice is narrower than ``width``."""
        if self.rounds < _LEAST_ROUNDS:
            return False
        _, low, high = self.ratio_to_best(fixed)
        return high - low < width

    def _ratio(self, other: Sequence[float]) -> tuple[float, float, float]:
        # With logarithms, because the mean of noisy ratios is too high whichever of the two divides.
        interval = paired(list(np.log(self.seconds[AUTO])), list(np.log(other)))
        mean, low, high = np.exp([interval.mean, interval.low, interval.high])
        return float(mean), float(low), float(high)


class Job:
    """The models, optimizers and compressors of all choices, on one rank.

    Args:
        trainer: the PyTorch trainer.
        settings: the settings of all trainings, with a constant learning rate.
        names: the choices.

    Attributes:
        processor: this process's mean processor seconds of a step in the last call of :meth:`train`.
    """

    processor = 0.0

    def __init__(self, trainer: TorchTrainer, settings: Settings, names: Sequence[str]) -> None:
        model = MODELS[settings.model]
        images = data.load(model)
        rows = np.arange(settings.batch_size) + settings.batch_size * trainer.rank
        rows %= len(images.train.labels)
        self._batch: Batch = images.train.load(rows), images.train.labels[rows]
        self._rate = settings.lr
        self.sessions: dict[str, TorchSession] = {
            name: trainer.start(
                settings, images.classes, compressions.parse(name, {}, model.last_layer), seed=0
            )
            for name in names
        }

    def train(self, name: str, steps: int) -> list[float]:
        """Makes steps with a choice, after a barrier; returns the seconds of each step."""
        hvd.barrier()
        used, ends = time.process_time(), [time.perf_counter()]
        self.sessions[name].train(
            [self._batch] * steps,
            [self._rate] * steps,
            lambda loss: ends.append(time.perf_counter()),
        )
        self.processor = (time.process_time() - used) / steps
        return [end - begin for begin, end in itertools.pairwise(ends)]


def plan(job: Job, longest: int, bar: tqdm) -> dict[str, Any]:
    """Trains until ``Auto`` has settled its plan; returns the number and the cost of these steps.

    Raises:
        RuntimeError: there is no settled plan after ``longest`` steps.
    """
    compressor = job.sessions[AUTO].compressor
    assert isinstance(compressor, Planning)
    seconds: list[float] = []
    while not compressor.settled and len(seconds) < longest:
        seconds += job.train(AUTO, 8)
        bar.set_description(f"planning, {len(seconds)} steps", refresh=True)
    if not compressor.settled:
        raise RuntimeError(f"expected a plan within {longest} steps, got none")
    # Means, not medians, because occasional long steps are part of the cost.
    planned = float(np.mean(job.train(AUTO, 48 + _SETTLING)[_SETTLING:]))
    counted = seconds[_FIRST:]
    return {
        "planned_after": len(seconds),
        "planning_steps": sum(counted) / planned - len(counted),
        "explanation": compressor.explain(),
    }


def compete(
    job: Job, fixed: Sequence[str], args: argparse.Namespace, bar: tqdm, trainer: TorchTrainer
) -> Contest:
    """Makes rounds of turns until the interval is narrow enough or time is up."""
    names = [AUTO, *fixed]
    contest = Contest({name: [] for name in names}, {name: [] for name in names})
    started = time.monotonic()
    for number in range(args.rounds):
        known = f", {_interval(contest.ratio_to_best(fixed))}" if number >= _LEAST_ROUNDS else ""
        bar.set_description(f"round {number + 1} of {args.rounds} at most{known}", refresh=True)
        for name in turns.order(names, number):
            seconds = job.train(name, args.block + _SETTLING)[_SETTLING:]
            everyone = trainer.gather(np.array([np.median(seconds), job.processor]))
            contest.seconds[name].append(float(everyone[:, 0].max()))
            contest.processor[name].append(float(everyone[:, 1].mean()))
            bar.update()
        elapsed = trainer.gather(np.array([time.monotonic() - started])).max()
        late = elapsed > args.seconds and contest.rounds >= _FEWEST_ROUNDS
        if late or contest.enough(fixed, args.width):
            break
    return contest


def _interval(ratio: Sequence[float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def table(record: dict[str, Any]) -> Table:
    """A table with one line for each choice."""
    rows = [
        [
            name,
            f"{1e3 * np.median(record['seconds'][name]):.1f}",
            "" if name == AUTO else _interval(record["ratios"][name]),
        ]
        for name in record["seconds"]
    ]
    return Table(("choice", "step ms", "auto's time over its"), rows)


def summary(record: dict[str, Any]) -> str:
    """The main results as a few lines of text."""
    best, dense = record["best"], record["best_uncompressed"]
    to_best = _interval(record["ratio_to_best"])
    to_dense = _interval(record["ratio_to_best_uncompressed"])
    headline = record["explanation_at_the_end"].splitlines()[0]
    return (
        f"at the end: {headline}\n"
        f"best fixed choice: {best}; auto takes {to_best} of its time\n"
        f"better of {' and '.join(UNCOMPRESSED)}: {dense}; auto takes {to_dense}\n"
        f"planning: settled after {record['planned_after']} steps, which took "
        f"{record['planning_steps']:.1f} steps longer"
    )


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; the first one prints and writes the results."""
    args = _parse(command_line)
    fixed = list(dict.fromkeys([*UNCOMPRESSED, *args.compression]))
    trainer = _trainer(args)
    settings = Settings(args.model, batch_size=args.batch_size, lr=args.lr, threads=args.threads)
    job = Job(trainer, settings, [AUTO, *fixed])
    with tqdm(
        total=args.rounds * (1 + len(fixed)),
        unit="turn",
        disable=trainer.rank != 0,
        mininterval=1 if sys.stderr.isatty() else 5,
    ) as bar:
        planning = plan(job, args.longest, bar)
        for name in fixed:
            job.train(name, 1 + _FIRST)
        contest = compete(job, fixed, args, bar, trainer)
    best, dense = contest.best(fixed), contest.best(UNCOMPRESSED)
    compressor = job.sessions[AUTO].compressor
    assert isinstance(compressor, Planning)
    record = {
        "schema": SCHEMA,
        **machine.network(),
        "ranks": trainer.size,
        "framework": args.framework,
        "configuration": dataclasses.asdict(settings),
        "pace": args.pace,
        "steps_a_turn": args.block,
        "versions": machine.versions(),
        "machine": machine.description(),
        **planning,
        "rounds": contest.rounds,
        "best": best,
        "ratio_to_best": contest.ratio_to_best(fixed),
        "best_uncompressed": dense,
        "ratio_to_best_uncompressed": contest.ratio_to_best(UNCOMPRESSED),
        "explanation_at_the_end": compressor.explain(),
        "ratios": {name: contest.ratio(name) for name in fixed},
        "seconds": contest.seconds,
        "processor_seconds": contest.processor,
    }
    if trainer.rank == 0:
        json_files.write(args.json, record)
        print(f"{planning['explanation']}\n\n{table(record).text()}\n\n{summary(record)}")
    return 0


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.auto",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0])
    add("--model", choices=tuple(MODELS), default="resnet20")
    add("--batch-size", type=positive, default=8, help="images a rank and step; default: 8")
    add("--lr", type=float, default=0.001, help="default: 0.001")
    add("--threads", type=positive, default=1, help="threads a rank; default: 1")
    add("--pace", type=float, metavar="SECONDS",
        help="in each step, wait so long instead of computing: a lab's hosts share processors")  # fmt: skip
    add("--compression", nargs="+", type=compression, default=FIXED, metavar="NAME[:key=value,...]",
        help=f"the fixed choices, {' and '.join(UNCOMPRESSED)} always among them; "
        f"default: {' '.join(FIXED)}")  # fmt: skip
    add(
        "--block", type=positive, default=10, help="timed steps of a choice in a round; default: 10"
    )
    add("--rounds", type=positive, default=24, help="the most rounds; default: 24")
    add("--seconds", type=float, default=1800.0, help="no new round begins later; default: 1800")
    add("--width", type=float, default=0.03, metavar="RATIO",
        help="the width of the interval at which to stop; default: 0.03")  # fmt: skip
    add("--longest", type=positive, default=400, help="the most steps of planning; default: 400")
    args = parser.parse_args(command_line)
    if args.pace is not None and args.framework != FRAMEWORKS[0]:
        parser.error(f"argument --pace: expected --framework {FRAMEWORKS[0]}, got {args.framework}")
    return args


def _trainer(args: argparse.Namespace) -> TorchTrainer:
    if args.framework == FRAMEWORKS[0]:
        return start(args.threads, args.pace)
    trainer = trainers.load(args.framework, args.threads)
    assert isinstance(trainer, TorchTrainer)
    return trainer


if __name__ == "__main__":
    sys.exit(main())
