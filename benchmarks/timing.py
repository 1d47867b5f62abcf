"""Times as multiples of a copy, which survive a machine that others use too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """How long something took.

    Attributes:
        ns_per_element: median.
        copies: median of the ratios to the mean of the copies right before and right after.
        copy_ns_per_element: median of those copies.
    """

    ns_per_element: float
    copies: float
    copy_ns_per_element: float


def beside_copies(work: Work, copy: Work, elements: int, repeats: int) -> Timing:
    """Measures ``work`` and ``copy`` in turns, after one untimed call of each."""
    copy()
    work()
    copies, times = [_seconds(copy)], []
    for _ in range(repeats):
        times.append(_seconds(work))
        copies.append(_seconds(copy))
    ratios = [
        2 * t / (before + after)
        for t, before, after in zip(times, copies[:-1], copies[1:], strict=True)
    ]
    scale = 1e9 / elements
    return Timing(
        ns_per_element=statistics.median(times) * scale,
        copies=statistics.median(ratios),
        copy_ns_per_element=statistics.median(copies) * scale,
    )


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
