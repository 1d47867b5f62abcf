"""Measures times in turns with a copy and a triad: on a shared machine, their ratios vary least."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]

TRIAD_BYTES = 12
"""The bytes that STREAM's triad ``out = x + a y`` moves for each float32 element."""

_PAUSE = 0.005
"""The pause before each measurement in seconds, because PyTorch's threads poll for work for a while, on the
cores of other threads.
"""


@dataclass(frozen=True)
class Timing:
    """The times of some work.

    Attributes:
        ns_per_element: the median time.
        copies: the median ratio to the mean of the copies right before and right after.
        copy_ns_per_element: the median time of the copies.
        bytes_per_element: the bytes that the work reads and writes.
        gigabytes_per_second: the bandwidth of these bytes at the median time, in 10^9 bytes per second.
        bandwidth: the median ratio of this bandwidth to that of the triads right before and right after.
    """

    ns_per_element: float
    copies: float
    copy_ns_per_element: float
    bytes_per_element: float
    gigabytes_per_second: float
    bandwidth: float


def beside(
    work: Work,
    copy: Work,
    triad: Work,
    elements: int,
    bytes_per_element: float,
    repeats: int,
    clock: str = "perf_counter",
) -> Timing:
    """Measures ``work``, ``copy`` and ``triad`` in turns, after one untimed call of each.

    ``clock`` is a function of :mod:`time`; ``"process_time"`` is for work in one thread beside other jobs.
    """
    for each in (copy, triad, work):
        each()
    times: list[float] = []
    copies, triads = [_seconds(copy, clock)], [_seconds(triad, clock)]
    for _ in range(repeats):
        times.append(_seconds(work, clock))
        copies.append(_seconds(copy, clock))
        triads.append(_seconds(triad, clock))
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
    """The ratio of each time to the mean of the others' before and after it."""
    neighbours = itertools.pairwise(others)
    return [2 * t / (before + after) for t, (before, after) in zip(times, neighbours, strict=True)]


def _seconds(work: Work, clock: str) -> float:
    now: Callable[[], float] = getattr(time, clock)
    time.sleep(_PAUSE)
    start = now()
    work()
    return now() - start
