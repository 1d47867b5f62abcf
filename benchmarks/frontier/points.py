"""Computes each method's bits, its accuracy with an interval, and whether it is on the frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks import intervals
from benchmarks.intervals import Interval
from benchmarks.papers.experiment import Row, choose, kinds, values
from benchmarks.papers.training import NONE


@dataclass(frozen=True)
class Point:
    """The results of one method.

    Attributes:
        method: the method's name.
        bits: the bits per element, mean over the seeds.
        accuracy: the mean test accuracy in per cent with its 95% interval; None if a training diverged.
        difference: the difference in points to uncompressed runs of the same seeds; None if one diverged.
        best: whether the method is on the frontier: no other has fewer bits and at least its mean accuracy.
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
