"""Does ``Auto`` find the best choice? Its steps beside those of fixed choices, in one job.

``python -m benchmarks.lab --hosts 4 --rate 1gbit -- python -m benchmarks.auto --json OUT``

First ``Auto`` trains until its plan is settled, and what its steps took beyond as many steps with that plan
is what planning cost. Then all choices train a few steps each, in turns, until the confidence interval of
the ratio of ``Auto``'s time to the best fixed choice's is narrow enough.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
from tqdm import tqdm

from benchmarks import compressions, data, machine, trainers, turns
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
"""Steps at the start of any training that are not counted: memory is allocated, connections warm up."""

_SETTLING = 2
"""Steps at the start of a turn that are not timed: names are negotiated anew after another choice's."""

_FEWEST_ROUNDS = 2
"""Whatever the time: an interval needs two."""

_LEAST_ROUNDS = 4
"""Before an interval is believed."""


@dataclass
class Contest:
    """Seconds of a step of each choice, one number a round: the median of a turn.

    Attributes:
        seconds: by choice.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def best(self, names: Sequence[str], without: int | None = None) -> str:
        """The choice with the shortest steps in the middle of all rounds, or of all but one."""
        taken = np.arange(self.rounds) != without
        return min(names, key=lambda name: float(np.median(np.array(self.seconds[name])[taken])))

    @property
    def rounds(self) -> int:
        """How many have been made."""
        return len(self.seconds[AUTO])

    def ratio(self, name: str) -> tuple[float, float, float]:
        """``Auto``'s time over a choice's: the geometric mean over rounds, and its 95% interval."""
        return self._ratio(self.seconds[name])

    def ratio_to_best(self, names: Sequence[str]) -> tuple[float, float, float]:
        """``Auto``'s time over the best choice's.

        In each round it is compared with what was best in the others: of several choices that are equally
        good, the one that looks best in all rounds owes that to its luck in these very rounds.
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
        # Of logarithms: the mean of noisy ratios is too high, whichever of the two is the divisor.
        interval = paired(list(np.log(self.seconds[AUTO])), list(np.log(other)))
        mean, low, high = np.exp([interval.mean, interval.low, interval.high])
        return float(mean), float(low), float(high)


class Job:
    """All choices' models, optimizers and compressors, on one rank.

    Args:
        trainer: of torch.
        settings: what to train; the learning rate stays.
        names: the choices.
    """

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
        """Makes steps with a choice, the ranks beginning together; the seconds of each."""
        hvd.barrier()
        ends = [time.perf_counter()]
        self.sessions[name].train(
            [self._batch] * steps,
            [self._rate] * steps,
            lambda loss: ends.append(time.perf_counter()),
        )
        return [end - begin for begin, end in itertools.pairwise(ends)]


def plan(job: Job, longest: int, bar: tqdm) -> dict[str, Any]:
    """Has ``Auto`` make its plan: after how many steps it has, and what they cost, in steps of the plan."""
    compressor = job.sessions[AUTO].compressor
    assert isinstance(compressor, Planning)
    seconds: list[float] = []
    while not compressor.settled and len(seconds) < longest:
        seconds += job.train(AUTO, 8)
        bar.set_description(f"planning, {len(seconds)} steps", refresh=True)
    if not compressor.settled:
        raise RuntimeError(f"expected a plan within {longest} steps, got none")
    # Means, not medians: now and then a step is longer with any choice.
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
    """Rounds of turns, until the interval is narrow enough, or time is up."""
    names = [AUTO, *fixed]
    contest = Contest({name: [] for name in names})
    started = time.monotonic()
    for number in range(args.rounds):
        known = f", {_interval(contest.ratio_to_best(fixed))}" if number >= _LEAST_ROUNDS else ""
        bar.set_description(f"round {number + 1} of {args.rounds} at most{known}", refresh=True)
        for name in turns.order(names, number):
            seconds = job.train(name, args.block + _SETTLING)[_SETTLING:]
            slowest = trainer.gather(np.array([np.median(seconds)])).max()
            contest.seconds[name].append(float(slowest))
            bar.update()
        elapsed = trainer.gather(np.array([time.monotonic() - started])).max()
        late = elapsed > args.seconds and contest.rounds >= _FEWEST_ROUNDS
        if late or contest.enough(fixed, args.width):
            break
    return contest


def _interval(ratio: Sequence[float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def table(record: dict[str, Any]) -> Table:
    """One line a choice."""
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
    """What the claims are about, in a few lines."""
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
    """Runs on every rank; the first one prints and writes."""
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
    }
    if trainer.rank == 0:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
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
        help="a step waits so long instead of computing, since a lab's hosts share processors")  # fmt: skip
    add("--compression", nargs="+", type=compression, default=FIXED, metavar="NAME[:key=value,...]",
        help=f"the fixed choices, {' and '.join(UNCOMPRESSED)} always among them; "
        f"default: {' '.join(FIXED)}")  # fmt: skip
    add(
        "--block", type=positive, default=10, help="timed steps of a choice in a round; default: 10"
    )
    add("--rounds", type=positive, default=24, help="at most so many; default: 24")
    add("--seconds", type=float, default=1800.0, help="no new round after so many; default: 1800")
    add("--width", type=float, default=0.03, metavar="RATIO",
        help="how wide the interval may be in the end; default: 0.03")  # fmt: skip
    add("--longest", type=positive, default=400, help="steps that a plan may take; default: 400")
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
