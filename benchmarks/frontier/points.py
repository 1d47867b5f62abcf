"""Computes each method's bits, its accuracy with an interval, and whether it is on the frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks import intervals
from benchmarks.frontier.tasks import MOMENTUM, Measure
from benchmarks.intervals import Interval
from benchmarks.papers.experiment import Row, choose, kinds, values
from benchmarks.papers.training import NONE


@dataclass(frozen=True)
class Point:
    """The results of one method.

    Attributes:
        method: the method's name.
        bits: the bits per element, mean over the seeds.
        value: the mean of what is measured, with its 95% interval; None if a training diverged.
        difference: the difference to uncompressed runs of the same seeds; None if one diverged.
        best: whether the method is on the frontier: no other has fewer bits and at least as good a mean.
    """

    method: str
    bits: float
    value: Interval | None
    difference: Interval | None
    best: bool = False


def by_optimizer(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each optimizer; rows of LeNet, which name none, are of momentum."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("optimizer", MOMENTUM), []).append(row)
    return found


def points(rows: list[Row], measure: Measure) -> list[Point]:
    """All methods, from the most bits to the fewest."""
    plain = choose(rows, method=NONE)
    found = [
        _point(method, choose(rows, method=method), plain, measure)
        for method in kinds(rows, "method")
    ]
    found.sort(key=lambda one: -one.bits)
    return [replace(one, best=_best(one, found, measure.sign)) for one in found]


def _point(method: str, own: list[Row], plain: list[Row], measure: Measure) -> Point:
    value, bits = measure.scale * values(own, measure.key), float(values(own, "bits").mean())
    if not np.isfinite(value).all():
        return Point(method, bits, None, None)
    of_seed = {row["seed"]: measure.scale * row["result"][measure.key] for row in plain}
    control = [of_seed[row["seed"]] for row in own]
    return Point(method, bits, intervals.mean(value), intervals.paired(value.tolist(), control))


def _best(one: Point, others: list[Point], sign: int) -> bool:
    if one.value is None:
        return False
    return not any(
        other.value is not None
        and other.bits <= one.bits
        and sign * other.value.mean >= sign * one.value.mean
        and (other.bits, other.value.mean) != (one.bits, one.value.mean)
        for other in others
    )
