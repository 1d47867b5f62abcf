"""Trains under elastic Horovod while ranks are killed, stopped, added and removed, and checks the outcome.

``python -m benchmarks.churn --minutes 10 --json build/churn.json``. With ``--undisturbed 20000``, jobs run
for 20,000 steps without events, in which memory and residuals must not grow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import json_files, machine
from benchmarks.churn.events import EVENTS
from benchmarks.churn.run import HOSTS, Disturbed, Outcome, Undisturbed, run
from benchmarks.command_line import Parser, compression, positive
from benchmarks.tables import Table

SCHEMA = "hvd_compress churn 1"

ROWS = (
    "onebit",
    "onebit:exchange=allgather",
    "int8:alpha=1,exchange=two_shot",
    "ternary:exchange=integer_sum",
    "onebit:exchange=two_shot",
    "ecq:exchange=allgather",
    "ecq:alpha=1,bucket=128,exchange=integer_sum",
    "qsgd:exchange=two_shot",
    "onebit:exchange=hierarchical",
)
"""The default compressions: every codec and exchange, with full error feedback if the codec bears it."""

MOST_SENT = 0.6
"""The largest permitted ratio of sent to uncompressed bytes in an interval. Small tensors are not
compressed, and the integers of ``integer_sum`` take more bits than codes."""


def main(command_line: list[str] | None = None) -> int:
    """Runs a job for each compression; returns 1 if any check failed, and 0 otherwise."""
    args = _parse(command_line)
    outcomes: list[Outcome] = []
    for number, row in enumerate(args.compression):
        print(f"{row}", flush=True)
        outcome = run(row, _what(args, number), _most_sent(row, args.slots))
        outcomes.append(outcome)
        print(f"  {_summary(outcome)}", flush=True)
        for problem in outcome.problems[:5]:
            print(f"  PROBLEM: {problem}", flush=True)
        if args.json:
            json_files.replace(args.json, _record(args, outcomes))
    print(f"\n{_table(outcomes).markdown()}")
    return int(any(outcome.problems for outcome in outcomes))


def _most_sent(row: str, slots: int) -> float:
    """:data:`MOST_SENT`, plus the bytes that a hierarchical exchange sends uncompressed within hosts."""
    within = 2 * (slots - 1) / slots if "exchange=hierarchical" in row else 0.0
    return MOST_SENT + within


def _what(args: argparse.Namespace, number: int) -> Disturbed | Undisturbed:
    """The disturbances of a compression's job, or the lack of them."""

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    if args.undisturbed:
        return Undisturbed(args.undisturbed, say, slots=args.slots)
    seconds = 60 * args.minutes / len(args.compression)
    return Disturbed(seconds, random.Random(args.seed + number), say, args.hosts, args.slots)


def _summary(outcome: Outcome) -> str:
    missing = "not kept" if outcome.missing is None else f"at most {outcome.missing:.1e} missing"
    died = f" and {outcome.collateral} ranks that died of it" if outcome.collateral else ""
    return (
        f"{outcome.steps} steps, {sum(outcome.events.values())} events{died} in {outcome.seconds:.0f} s, "
        f"loss {outcome.losses[0]:.2f} to {outcome.losses[1]:.2f}, of the unsent {missing}, "
        f"messages at most {outcome.sent:.3f} of uncompressed, "
        f"memory {outcome.growth / 1e6:+.1f} MB, {len(outcome.problems)} problems"
    )


def _table(outcomes: Sequence[Outcome]) -> Table:
    """A table with one line for each job: for each kind of event, the count and the longest recovery."""
    header = (
        "compression",
        "steps",
        *EVENTS,
        "missing",
        "sent",
        "unsent",
        "memory, MB",
        "problems",
    )
    rows = []
    for outcome in outcomes:
        events = (
            f"{outcome.events[kind]} ({outcome.recovery[kind]:.1f} s)"
            if kind in outcome.events
            else "-"
            for kind in EVENTS
        )
        rows.append(
            [
                outcome.compression,
                str(outcome.steps),
                *events,
                "-" if outcome.missing is None else f"{outcome.missing:.0e}",
                f"{outcome.sent:.3f}",
                " to ".join(f"{norm:.2g}" for norm in outcome.unsent),
                f"{outcome.growth / 1e6:+.1f}",
                str(len(outcome.problems)),
            ]
        )
    return Table(header, rows)


def _record(args: argparse.Namespace, outcomes: list[Outcome]) -> str:
    record = {
        "schema": SCHEMA,
        "machine": machine.description(),
        "versions": machine.versions(),
        "minutes": args.minutes,
        "undisturbed": args.undisturbed,
        "slots": args.slots,
        "seed": args.seed,
        "jobs": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(record, indent=1) + "\n"


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.churn", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=10, help="time for all compressions")
    parser.add_argument("--hosts", type=positive, default=HOSTS, help="hosts at the start")
    parser.add_argument("--slots", type=positive, default=1, help="ranks on each host")
    parser.add_argument("--compression", nargs="+", type=compression, default=ROWS)
    parser.add_argument(
        "--undisturbed",
        type=positive,
        metavar="STEPS",
        help="make so many steps with each compression, without any event",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the order of events")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
