"""Runs every fault with every frontend and exchange: ``python -m tests.faults --json OUT``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks import json_files, machine
from benchmarks.command_line import Parser, positive
from benchmarks.tables import Table
from tests.contract.cases import ROWS
from tests.faults.cases import FAULTS, STOCK, Case, exchanges_of
from tests.faults.frontends import FRONTENDS
from tests.faults.run import Outcome, run

SCHEMA = "hvd_compress faults 1"


def main(command_line: list[str] | None = None) -> int:
    """Runs the cases; returns 1 if a promise was broken, and 0 otherwise."""
    args = _parse(command_line)
    chance = random.Random(args.seed)
    outcomes: list[Outcome] = []
    before = json.loads(args.json.read_text())["cases"] if args.add else []
    every = itertools.starmap(Case, itertools.product(args.frontend, args.exchange, args.fault))
    cases = [one for one in every if one.exchange in (STOCK, *exchanges_of(one.frontend))]
    for case in [one for one in cases for _ in range(args.repeat)]:
        outcome = run(case, chance)
        outcomes.append(outcome)
        print(_summary(outcome), flush=True)
        if outcome.problems():
            print(outcome.printed, flush=True)
        if args.json:
            json_files.replace(args.json, _record(outcomes, before))
    print(f"\n{_table(outcomes).markdown()}")
    return int(any(outcome.problems() for outcome in outcomes))


def _summary(outcome: Outcome) -> str:
    statuses = ", ".join(str(one.status) for one in outcome.endings)
    line = f"{outcome.case}: statuses {statuses}"
    if FAULTS[outcome.case.fault].ends:
        line += (
            f", errors within {_last(outcome, 'raised')} s, ends within {_last(outcome, 'ended')} s"
        )
    return "\n  PROBLEM: ".join([line, *outcome.problems()])


def _last(outcome: Outcome, what: str) -> str:
    """The seconds from the fault until all other ranks ``raised`` or ``ended``; "-" if one did not."""
    times = [getattr(one, what) for one in outcome.endings[:-1]]
    return "-" if None in times or not times else f"{max(times):.1f}"


def _table(outcomes: list[Outcome]) -> Table:
    """A line for each fault, with the slowest cases of each frontend, stock and compressed."""
    frontends = list(dict.fromkeys(outcome.case.frontend for outcome in outcomes))
    lines = []
    for fault in dict.fromkeys(outcome.case.fault for outcome in outcomes):
        cells = []
        for frontend in frontends:
            of_cell = [o for o in outcomes if (o.case.fault, o.case.frontend) == (fault, frontend)]
            stock = [o for o in of_cell if o.case.exchange == STOCK]
            parts = (_slowest(stock), _slowest([o for o in of_cell if o not in stock]))
            cells.append("; ".join(dict.fromkeys(parts)))
        lines.append([FAULTS[fault].does, *cells])
    return Table(("what happens to a rank", *frontends), lines)


def _slowest(outcomes: list[Outcome]) -> str:
    """The outcome of the other ranks in some cases; if they end, the time of the last one's error."""
    if any(outcome.problems() for outcome in outcomes):
        return "not as promised"
    if not outcomes:
        return "-"
    if not FAULTS[outcomes[0].case.fault].ends:
        return "goes on"
    others = [one for outcome in outcomes for one in outcome.endings[:-1]]
    came = {
        "": [one.raised for one in others if one.raised is not None],
        "abort ": [one.ended for one in others if one.raised is None and one.ended is not None],
    }
    return ", ".join(f"{what}{max(times):.1f} s" for what, times in came.items() if times)


def _record(outcomes: list[Outcome], before: list[dict[str, Any]]) -> str:
    again = [dataclasses.asdict(outcome.case) for outcome in outcomes]
    rows = [row for row in before if row["case"] not in again]
    for outcome in outcomes:
        row = {**dataclasses.asdict(outcome), "problems": outcome.problems()}
        del row["printed"]
        # The messages of errors contain paths of the machine.
        row["refused"] = outcome.refused.partition(":")[0]
        for ending in row["endings"]:
            ending["error"] = ending["error"].partition(":")[0]
        rows.append(row)
    versions = machine.versions()
    record = {
        "schema": SCHEMA,
        "machine": machine.description(),
        "versions": versions,
        "cases": rows,
    }
    return json.dumps(record, indent=1) + "\n"


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tests.faults", description=__doc__)
    add, exchanges = parser.add_argument, [STOCK, *ROWS]
    add("--frontend", nargs="+", choices=FRONTENDS, default=list(FRONTENDS), metavar="NAME")
    add("--exchange", nargs="+", choices=exchanges, default=exchanges, metavar="NAME")
    add("--fault", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    add("--repeat", type=positive, default=1, help="how often each case runs")
    add("--seed", type=int, default=0, help="decides the moments of signals")
    add("--json", type=Path, metavar="OUT")
    add("--add", action="store_true", help="keep the cases in OUT that are not run")
    args = parser.parse_args(command_line)
    if args.add and not args.json:
        parser.error("expected --json OUT with --add, got none")
    return args


if __name__ == "__main__":
    sys.exit(main())
