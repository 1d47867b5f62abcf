"""The tables of docs/papers.md."""

from __future__ import annotations

from collections import Counter

from benchmarks.pages.reading import RECORDS
from benchmarks.papers import record
from benchmarks.papers.__main__ import claims_table
from benchmarks.papers.experiment import Claim, Row
from benchmarks.papers.registry import EXPERIMENTS
from benchmarks.tables import Table
from benchmarks.verdicts import Verdict

_COMPARES_NOTHING = ("terngrad-sharing",)
"""The experiments whose papers make no statement to compare with."""


def rows(name: str) -> list[Row]:
    """The cases of an experiment's record."""
    return record.read(RECORDS / f"papers-{name}.json").rows


def claims(name: str) -> list[Claim]:
    """The statements of an experiment's paper, judged by the record's cases."""
    return EXPERIMENTS[name].claims(rows(name))


def results(name: str) -> Table:
    """The table of an experiment's results, from its record."""
    return EXPERIMENTS[name].table(rows(name))


def statements(name: str) -> Table:
    """The table of the paper's statements, with the verdicts."""
    return claims_table(claims(name))


def summary() -> Table:
    """The table of all experiments, with the number of statements of each verdict."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        counts: Counter[Verdict] = Counter()
        if name not in _COMPARES_NOTHING:
            counts.update(claim.finding.verdict for claim in claims(name))
        order = (Verdict.HOLDS, Verdict.FAILS, Verdict.UNKNOWN)
        cells = [str(counts[verdict] or "") for verdict in order]
        lines.append((f"[`{name}`](#{name})", experiment.paper, *cells))
    header = ("name", "reproduces", *(verdict.value for verdict in order))
    return Table(header, lines, left=2)
