"""The bits and the accuracy of each method, with intervals, and whether another method is better."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks import intervals
from benchmarks.intervals import Interval
from benchmarks.papers.experiment import Row, choose, kinds, values
from benchmarks.papers.training import NONE


@dataclass(frozen=True)
class Point:
    """One method.

    Attributes:
        method: its name.
        bits: of an element, mean over the seeds.
        accuracy: test accuracy in per cent, mean over the seeds and its 95% interval; None where a seed
            diverged.
        difference: in points to the runs of the same seeds that are not compressed; None as accuracy.
        best: whether it is on the frontier: no method has fewer bits and at least its mean accuracy.
    """

    method: str
    bits: float
    accuracy: Interval | None
    difference: Interval | None
    best: bool = False


def points(rows: list[Row]) -> list[Point]:
    """All methods, from the most bits to the fewest."""
    plain = 100 * values(choose(rows, method=NONE), "test_accuracy")
    found = [_point(method, choose(rows, method=method), plain) for method in kinds(rows, "method")]
    found.sort(key=lambda one: -one.bits)
    return [replace(one, best=_best(one, found)) for one in found]


def _point(method: str, own: list[Row], plain: np.ndarray) -> Point:
    accuracy, bits = 100 * values(own, "test_accuracy"), float(values(own, "bits").mean())
    if not np.isfinite(accuracy).all():
        return Point(method, bits, None, None)
    return Point(
        method, bits, intervals.mean(accuracy), intervals.paired(accuracy.tolist(), plain.tolist())
    )


def _best(one: Point, others: list[Point]) -> bool:
    if one.accuracy is None:
        return False
    return not any(
        other.accuracy is not None
        and other.bits <= one.bits
        and other.accuracy.mean >= one.accuracy.mean
        and (other.bits, other.accuracy.mean) != (one.bits, one.accuracy.mean)
        for other in others
    )
