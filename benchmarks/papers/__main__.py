"""Runs a paper's experiment with this package's codecs, and puts the results beside the paper's.

``python -m benchmarks.papers NAME --json OUT`` runs all cases and prints two tables: the results, and the
paper's statements with what was found. ``--plot PICTURE`` draws what OUT holds, and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine
from benchmarks.command_line import Parser
from benchmarks.papers import record as records
from benchmarks.papers.experiment import Claim, Experiment, row
from benchmarks.papers.record import Record
from benchmarks.papers.registry import EXPERIMENTS
from benchmarks.papers.training import DATA
from benchmarks.tables import Table
from benchmarks.verdicts import Finding


def main(command_line: list[str] | None = None) -> int:
    """Runs, draws, or lists the experiments."""
    args = _parse(command_line)
    if args.name == "list":
        print(
            Table(("name", "reproduces"), [(e.name, e.paper) for e in EXPERIMENTS.values()]).text()
        )
        return 0
    experiment = EXPERIMENTS[args.name]
    try:
        if args.plot:
            return _draw(experiment, args.json, args.plot)
        if args.data:
            experiment = on_data(experiment, args.data)
        record = make(experiment, args.json, full=args.full, resume=args.resume)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for shown in (experiment.table(record.rows), claims_table(experiment.claims(record.rows))):
        print(f"{shown.markdown() if args.markdown else shown.text()}\n")
    return 0


def make(experiment: Experiment, path: Path, *, full: bool, resume: bool) -> Record:
    """Runs the cases that the file lacks, and writes each as it is done.

    Raises:
        ValueError: ``resume``, and the file holds something else.
    """
    record = Record(experiment.name, full, machine.versions(), machine.description())
    if resume:
        record = records.resumed(path, record)
        _check_cases(experiment, path, record)
        _check_recipe(experiment.cases(full), path, record)
    missing = [case for case in experiment.cases(full) if not record.has(case)]
    here = machine.description()
    if missing and record.machine != here:
        record.machine["resumed_on"] = f"{here['cpu']}, commit {here['commit']}"
    with tqdm(
        total=sum(experiment.ticks(case) for case in missing),
        mininterval=1 if sys.stderr.isatty() else 10,
    ) as bar:
        for case in missing:
            bar.set_description(_describe(case), refresh=False)
            result = experiment.run(case, lambda: bar.update() and None)
            record.rows.append(records.as_json(row(case, result)))
            record.write(path)
    record.claims = records.claims(experiment.claims(record.rows))
    record.write(path)
    return record


def on_data(experiment: Experiment, choice: str) -> Experiment:
    """The experiment on other images.

    Raises:
        ValueError: it has no choice of data.
    """

    def cases(full: bool) -> list[Any]:
        return [dataclasses.replace(case, data=choice) for case in experiment.cases(full)]

    fields = dataclasses.fields(experiment.cases(False)[0])
    if not any(one.name == "data" and one.default == DATA for one in fields):
        raise ValueError(f"--data: {experiment.name} has data of its own, got {choice}")
    return dataclasses.replace(experiment, cases=cases)


def claims_table(claims: list[Claim]) -> Table:
    """The paper's statements, one a line."""
    header = (
        "the paper says",
        "published",
        "measured",
        "verdict",
        "margin, 95% interval",
        "seeds",
        "seen from",
    )
    lines = [(c.text, c.published, c.measured, *_cells(c.finding)) for c in claims]
    return Table(header, lines, left=4)


def _cells(finding: Finding) -> tuple[str, ...]:
    margin = finding.margin
    shown = "-" if margin is None else "{:.3g} ({:.3g} to {:.3g})".format(*margin)
    if margin and margin[1] == margin[2] and finding.detectable is None:
        shown = f"{margin[0]:.3g} with every seed"
    return (
        finding.verdict,
        shown,
        str(finding.seeds),
        "-" if finding.detectable is None else f"{finding.detectable:.2g}",
    )


def _draw(experiment: Experiment, path: Path, picture: Path) -> int:
    if experiment.draw is None:
        raise ValueError(f"--plot: {experiment.name} has no picture, only a table")
    record = records.read(path)
    if record.experiment != experiment.name:
        raise ValueError(f"{path}: expected {experiment.name}, got {record.experiment}")
    _check_cases(experiment, path, record)
    if not record.rows:
        raise ValueError(f"{path}: expected cases of {experiment.name} to draw, got none")
    experiment.draw(record.rows, picture)
    return 0


def _check_cases(experiment: Experiment, path: Path, record: Record) -> None:
    """Raises ``ValueError`` where a case of the file has other settings than the experiment has."""
    case = experiment.cases(False)[0]
    expected = {"result", *(field.name for field in dataclasses.fields(case))}
    for one in record.rows:
        if set(one) != expected:
            raise ValueError(
                f"{path}: expected cases with {', '.join(sorted(expected))}, got {', '.join(sorted(one))}"
            )


def _check_recipe(cases: Sequence[Any], path: Path, record: Record) -> None:
    """Raises ``ValueError`` where the file has a case of another recipe, such as of other data."""
    wanted = [records.as_json(row(case, {})) for case in cases]
    for one in record.rows:
        if {**one, "result": {}} not in wanted:
            nearest = max(wanted, key=lambda case: sum(case[k] == v for k, v in one.items()))
            odd = [key for key, value in one.items() if key != "result" and nearest[key] != value]
            raise ValueError(
                f"{path}: expected cases with "
                f"{', '.join(f'{key} {nearest[key]}' for key in odd)}, got "
                f"{', '.join(f'{one[key]}' for key in odd)}; without --resume the file is written anew"
            )


def _describe(case: object) -> str:
    fields = dataclasses.asdict(case)  # type: ignore[call-overload]
    return " ".join(str(value) for value in fields.values())[:60]


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=("list", *EXPERIMENTS), metavar="NAME", help="list prints all names")
    add("--json", type=Path, metavar="OUT")
    add("--full", action="store_true", help="the paper's size, which may take hours")
    add("--data", metavar="DATA",
        help=f"{DATA}, which is the default, digits, or a folder: MNIST, CIFAR-10, ImageNet")  # fmt: skip
    add("--resume", action="store_true", help="keep the cases that OUT holds already")
    add("--plot", type=Path, metavar="PICTURE", help="draw what OUT holds, and run nothing")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args(command_line)
    if args.name != "list" and args.json is None:
        parser.error("--json: expected the file for the results")
    return args


if __name__ == "__main__":
    sys.exit(main())
