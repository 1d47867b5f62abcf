"""Times beside a copy and a triad in the same run, whose ratios survive a machine that others use too."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]

TRIAD_BYTES = 12
"""What STREAM's triad ``out = x + a y`` moves for each float32 element."""

_PAUSE = 0.005
"""Seconds before each measurement: PyTorch's threads look out for more work for a while, on the cores of
other threads.
"""


@dataclass(frozen=True)
class Timing:
    """How long something took.

    Attributes:
        ns_per_element: median.
        copies: median of the ratios to the mean of the copies right before and right after.
        copy_ns_per_element: median of those copies.
        bytes_per_element: what is read and written.
        gigabytes_per_second: of these bytes, 10^9 of them, at the median time.
        bandwidth: median of the ratios of these bytes a second to the triads' right before and after.
    """

    ns_per_element: float
    copies: float
    copy_ns_per_element: float
    bytes_per_element: float
    gigabytes_per_second: float
    bandwidth: float


def beside(
    work: Work, copy: Work, triad: Work, elements: int, bytes_per_element: float, repeats: int
) -> Timing:
    """Measures ``work``, ``copy`` and ``triad`` in turns, after one untimed call of each."""
    for each in (copy, triad, work):
        each()
    times: list[float] = []
    copies, triads = [_seconds(copy)], [_seconds(triad)]
    for _ in range(repeats):
        times.append(_seconds(work))
        copies.append(_seconds(copy))
        triads.append(_seconds(triad))
    ns = statistics.median(times) * 1e9 / elements
    return Timing(
        ns_per_element=ns,
        copies=statistics.median(_ratios(times, copies)),
        copy_ns_per_element=statistics.median(copies) * 1e9 / elements,
        bytes_per_element=bytes_per_element,
        gigabytes_per_second=bytes_per_element / ns,
        bandwidth=bytes_per_element / TRIAD_BYTES / statistics.median(_ratios(times, triads)),
    )


def _ratios(times: list[float], others: list[float]) -> list[float]:
    """Each time over the mean of the others' before and after it."""
    neighbours = itertools.pairwise(others)
    return [2 * t / (before + after) for t, (before, after) in zip(times, neighbours, strict=True)]


def _seconds(work: Work) -> float:
    time.sleep(_PAUSE)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
