"""The parts of every experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import Table
from benchmarks.verdicts import Finding

Row = dict[str, Any]
"""One case: its settings by name, and its result; all of it JSON."""

Advance = Callable[[], None]
"""A function that is called after each tick of a case."""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the finding here.

    Attributes:
        text: the statement, and its place in the paper.
        published: the paper's numbers.
        measured: our numbers.
        finding: whether our numbers support it.
    """

    text: str
    published: str
    measured: str
    finding: Finding


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    Attributes:
        name: the name on the command line.
        paper: the authors, the year, and the table or figure.
        cases: all settings, a frozen dataclass each; of the paper's size where its argument is true,
            and otherwise of a size that takes minutes.
        ticks: a function that returns a case's number of ticks, for the progress bar.
        run: a function that makes one case, and returns its result as JSON types.
        table: a function that returns the results as a table.
        claims: a function that returns the paper's statements beside the results.
        draw: a function that draws the results; None where there is no picture.
    """

    name: str
    paper: str
    cases: Callable[[bool], Sequence[Any]]
    ticks: Callable[[Any], int]
    run: Callable[[Any, Advance], dict[str, Any]]
    table: Callable[[list[Row]], Table]
    claims: Callable[[list[Row]], list[Claim]]
    draw: Callable[[list[Row], Path], None] | None = None


def row(settings: Any, result: dict[str, Any]) -> Row:
    """A case as the record has it."""
    return {**dataclasses.asdict(settings), "result": result}


def choose(rows: list[Row], **wanted: Any) -> list[Row]:
    """The rows with those settings."""
    return [one for one in rows if all(one[key] == value for key, value in wanted.items())]


def values(rows: list[Row], *path: str | int) -> np.ndarray:
    """The value of each row's result at a path, as float64; None is NaN."""
    found = []
    for one in rows:
        value: Any = one["result"]
        for key in path:
            value = value[key]
        found.append(value)
    return np.array(found, np.float64)


def kinds(rows: list[Row], key: str) -> list[Any]:
    """The different values of a setting, in the order in which they first appear."""
    return list(dict.fromkeys(one[key] for one in rows))


def spread(numbers: np.ndarray, pattern: str = "") -> str:
    """The mean, and the sample's standard deviation where there are several.

    Without a pattern, the mean has three digits or, where they differ less, up to two of the deviation's.
    """
    if not np.isfinite(numbers).all():
        bad = int((~np.isfinite(numbers)).sum())
        return f"diverges ({bad} of {numbers.size})"
    mean = float(numbers.mean())
    if numbers.size == 1:
        return (pattern or "{:.3g}").format(mean)
    deviation = float(numbers.std(ddof=1))
    if not pattern:
        place, last = _place(mean), _place(deviation)
        # Two digits of the deviation, but at most four of the mean, or three where it does not vary.
        digits = min(1 - last, 3 - place) if last >= place - 3 else 2 - place
        pattern = f"{{:.{max(digits, 0)}f}}"
    return f"{pattern.format(mean)} ± {pattern.format(deviation)}"


def _place(number: float) -> int:
    """The place of the first digit, as a power of ten."""
    return int(np.floor(np.log10(abs(number)))) if number else -99


def percent(rows: list[Row], *path: str | int) -> str:
    """The :func:`spread` of each row's share at a path, as :func:`values`, in per cent."""
    return spread(100 * values(rows, *path), "{:.1f}")
