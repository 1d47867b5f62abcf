"""Dettmers (2016), table 1: errors of the four 8-bit types on random numbers.

Besides the nearest magnitude, which this package sends, the errors of a search that misses half of the
upper neighbours are measured. See docs/papers.md for why.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.papers.experiment import (
    Advance,
    Claim,
    Experiment,
    Row,
    choose,
    kinds,
    values,
)
from benchmarks.papers.native import Native
from benchmarks.tables import Table
from benchmarks.verdicts import judge
from hvd_compress.codecs import Int8, NoiseKey
from hvd_compress.codecs.int8 import Kind, magnitudes

KINDS: tuple[Kind, ...] = ("dynamic", "linear", "mantissa", "static")
UNIFORM = "U(0, 1)"
DEVIATIONS = {"N(0, 1)": 1.0, "N(0, 10^2)": 10.0, "N(0, 0.2^2)": 0.2}

RELATIVE: dict[str, tuple[float, ...]] = {
    "U(0, 1)": (1.39, 2.16, 7.22, 4.82),
    "N(0, 1)": (2.46, 6.47, 6.89, 6.3),
    "N(0, 10^2)": (2.49, 6.44, 7.19, 6.28),
    "N(0, 0.2^2)": (2.45, 6.15, 8.26, 6.58),
}
"""The table's mean relative errors in per cent, in the order of KINDS."""
ABSOLUTE: dict[str, tuple[float, ...]] = {
    "U(0, 1)": (0.00004, 0.0024, 0.0017, 0.0007),
    "N(0, 1)": (0.0005, 0.0004, 0.0104, 0.0093),
    "N(0, 10^2)": (0.049, 0.041, 1.066, 0.926),
    "N(0, 0.2^2)": (0.000018, 0.000015, 0.00055, 0.00022),
}
"""The table's mean absolute errors."""

_CHUNK = 1 << 20
_NEAREST = "nearest"
_PARITIES = {"down from even": 0, "down from odd": 1}
"""Searches that take the lower neighbour wherever its place in the table is even, or odd."""


@dataclass(frozen=True)
class Settings:
    """One distribution.

    Attributes:
        distribution: the distribution in the paper's notation.
        count: the number of numbers.
        seed: the seed of the numbers.
    """

    distribution: str
    count: int = 25_000_000
    seed: int = 0

    @property
    def offset(self) -> int:
        """The exponent offset of the types that are not normalised (section 3.4)."""
        return 2 if self.distribution == "N(0, 10^2)" else 1

    def draw(self) -> np.ndarray:
        """The numbers, shape=(count,), float32."""
        place = [UNIFORM, *DEVIATIONS].index(self.distribution)
        rng = np.random.default_rng([self.seed, place])
        if self.distribution == UNIFORM:
            return rng.random(self.count, np.float32)
        deviation = np.float32(DEVIATIONS[self.distribution])
        return deviation * rng.standard_normal(self.count, np.float32)


def cases(full: bool) -> list[Settings]:
    """The paper's 25 million numbers, which take a minute; what a normalised type divides by varies."""
    return [Settings(name, seed=seed) for seed in range(3) for name in (UNIFORM, *DEVIATIONS)]


def run(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Errors of each type and search: the means of ``|error|``, ``error^2`` and ``|error / x|``."""
    x = settings.draw()
    largest = float(np.abs(x).max())
    result: dict[str, Any] = {}
    for kind in KINDS:
        codec = Int8(kind, "tensor", settings.offset)
        sent = Native().through(codec, x.shape, x, NoiseKey())
        scale = largest if kind in ("dynamic", "linear") else 10.0**settings.offset
        totals = {name: np.zeros(4) for name in (_NEAREST, *_PARITIES)}
        for start in range(0, x.size, _CHUNK):
            part = x[start : start + _CHUNK].astype(np.float64)
            totals[_NEAREST] += _sums(part, sent[start : start + _CHUNK])
            for name, parity in _PARITIES.items():
                totals[name] += _sums(part, one_sided(part, kind, scale, parity))
        result[kind] = {name: _means(total, x.size) for name, total in totals.items()}
        advance()
    return result


def one_sided(x: np.ndarray, kind: Kind, scale: float, parity: int) -> np.ndarray:
    """Rounds to the nearest magnitude, but down between some of them.

    Args:
        x: the numbers, shape=(n,), float64.
        kind: the type.
        scale: the value of its largest magnitude.
        parity: the parity of the lower neighbour's place in the sorted table, where numbers are always
            rounded down.

    Returns:
        The rounded numbers, shape=(n,), float64.
    """
    table = np.arange(128) / 127 if kind == "linear" else np.unique(magnitudes(kind))
    table = table.astype(np.float64)
    y = np.abs(x) / scale
    below = np.clip(np.searchsorted(table, y, side="right") - 1, 0, table.size - 1)
    above = np.minimum(below + 1, table.size - 1)
    up = (table[above] - y < y - table[below]) & (below % 2 != parity)
    return np.sign(x) * scale * np.where(up, table[above], table[below])


def _sums(x: np.ndarray, sent: np.ndarray) -> np.ndarray:
    error = np.abs(sent - x)
    # Nothing can be said of the relative error of a zero, which a uniform float32 may be.
    kept = x != 0
    relative = error[kept] / np.abs(x[kept])
    return np.array([error.sum(), np.square(error).sum(), relative.sum(), kept.sum()])


def _means(total: np.ndarray, count: int) -> dict[str, float]:
    absolute, squared, relative, kept = total
    return {
        "absolute": absolute / count,
        "squared": squared / count,
        "relative_percent": 100 * relative / kept,
    }


def table(rows: list[Row]) -> Table:
    """In the paper's order; in brackets what the table has."""
    header = (
        "numbers",
        "type",
        "relative error %",
        "the same, half rounded down",
        "published",
        "mean absolute",
        "mean square, half rounded down",
        "published absolute",
    )
    lines = []
    for name in kinds(rows, "distribution"):
        own = choose(rows, distribution=name)
        for place, kind in enumerate(KINDS):
            relative, squared = (
                [values(own, kind, parity, key).mean() for parity in _PARITIES]
                for key in ("relative_percent", "squared")
            )
            lines.append(
                (
                    name,
                    kind,
                    f"{values(own, kind, _NEAREST, 'relative_percent').mean():.2f}",
                    " or ".join(f"{half:.2f}" for half in relative),
                    f"{RELATIVE[name][place]:g}",
                    f"{values(own, kind, _NEAREST, 'absolute').mean():.2g}",
                    " or ".join(f"{half:.2g}" for half in squared),
                    f"{ABSOLUTE[name][place]:g}",
                )
            )
    return Table(header, lines, left=2)


def claims(rows: list[Row]) -> list[Claim]:
    """The order of the types, and where the published numbers come from."""
    found = []
    for name in kinds(rows, "distribution"):
        own = choose(rows, distribution=name)
        ours = {kind: values(own, kind, _NEAREST, "relative_percent") for kind in KINDS}
        order = _order(RELATIVE[name])
        found.append(
            Claim(
                f"{name}: order by relative error",
                " < ".join(order),
                " < ".join(_order([ours[kind].mean() for kind in KINDS])),
                judge(*(ours[worse] - ours[better] for better, worse in pairwise(order))),
            )
        )
    nearest = [(RELATIVE, "relative_percent", _NEAREST), (ABSOLUTE, "absolute", _NEAREST)]
    halves = [(RELATIVE, "relative_percent", ""), (ABSOLUTE, "squared", "")]
    texts = (
        "the relative errors are those of the nearest magnitude",
        "the absolute errors are those of the nearest magnitude",
        "the relative errors are those of a search that rounds down in half of the intervals",
        "the absolute errors are that search's mean squares",
    )
    for text, (published, key, search) in zip(texts, nearest + halves, strict=True):
        of_cells = _ratios(rows, published, key, search)
        ratios = [one.mean() for one in of_cells]
        within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        found.append(
            Claim(
                text,
                "16 of 16",
                f"{within} of {len(ratios)} within 10% (ratios {min(ratios):.2g} to {max(ratios):.3g})",
                judge(*(x - 0.9 for x in of_cells), *(1.1 - x for x in of_cells)),
            )
        )
    return found


def _order(errors: Any) -> list[Kind]:
    return [KINDS[place] for place in np.argsort(errors)]


def _ratios(
    rows: list[Row], published: dict[str, tuple[float, ...]], key: str, search: str
) -> list[np.ndarray]:
    """Ours by the paper's, of each seed; without a search named, of the parity that is nearer."""
    found = []
    for distribution in kinds(rows, "distribution"):
        own = choose(rows, distribution=distribution)
        for place, kind in enumerate(KINDS):
            searches = [search] if search else list(_PARITIES)
            paper = published[distribution][place]
            ratios = [values(own, kind, name, key) / paper for name in searches]
            found.append(min(ratios, key=lambda ratio: abs(np.log(ratio.mean()))))
    return found


EXPERIMENT = Experiment(
    name="int8-errors",
    paper="Dettmers 2016, table 1: random numbers",
    cases=cases,
    ticks=lambda settings: len(KINDS),
    run=run,
    table=table,
    claims=claims,
)
