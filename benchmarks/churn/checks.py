"""Checks that must pass whatever ranks come and go; each returns a message for every problem."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.churn.reports import Report

KEPT = 1e-3
"""The largest missing part of the unsent gradients that is permitted; a lost residual is much more."""

ROUNDING = 1e-6
"""The permitted rounding errors, in proportion to the sum of all gradients."""

LEARNED = 0.9
"""The largest permitted loss at the end, in proportion to that at the start."""

GROWTH = 30e6
"""The bytes by which a process may grow after the first quarter of its reports, while ranks come and go."""

STEADY_GROWTH = 5e6
"""The permitted growth without events: a leak of a kilobyte in each of 20,000 steps is more."""

BOUNDED = 2.0
"""The largest permitted norm of unsent gradients in the second half, in proportion to the first half's."""


def replicas(reports: Sequence[Report]) -> list[str]:
    """Finds ranks whose weights differ at the same commit."""
    together: dict[tuple[int, int], list[Report]] = defaultdict(list)
    for report in reports:
        together[report.run, report.step].append(report)
    problems = []
    for (_, step), group in together.items():
        ranks = [report.rank for report in group]
        if len({report.weights for report in group}) > 1:
            problems.append(f"step {step}: ranks {sorted(ranks)} have different weights")
        if len(set(ranks)) < len(ranks) or len({report.size for report in group}) > 1:
            problems.append(f"step {step}: ranks {sorted(ranks)} disagree on who they are")
    return problems


def conservation(reports: Sequence[Report]) -> list[str]:
    """Finds gradients that were neither applied nor are still to be sent."""
    return [
        f"step {report.step}, rank {report.rank}: gradients of norm {report.missing:.3g} are neither "
        f"applied nor unsent; the unsent ones have norm {report.unsent:.3g}"
        for report in reports
        if report.missing is not None
        and report.missing > KEPT * report.unsent + ROUNDING * report.gradients
    ]


def compression(reports: Sequence[Report], most: float) -> list[str]:
    """Finds intervals in which more than ``most`` of the uncompressed bytes were sent."""
    return [
        f"step {report.step}, rank {report.rank}: messages have {report.sent:.3f} of the uncompressed "
        f"bytes, expected at most {most}"
        for report in reports
        if report.sent > most
    ]


def learning(reports: Sequence[Report]) -> list[str]:
    """Checks that the loss falls."""
    first, last = mean_loss(reports[:20]), mean_loss(reports[-20:])
    if last <= LEARNED * first:
        return []
    return [f"the loss went from {first:.3f} to {last:.3f}, expected at most {LEARNED} of it"]


def mean_loss(reports: Sequence[Report]) -> float:
    """The mean loss of some reports."""
    return sum(report.loss for report in reports) / len(reports)


def growth(reports: Sequence[Report]) -> float:
    """The largest growth of a process's memory after the first quarter of its reports, in bytes."""
    processes: dict[int, list[int]] = defaultdict(list)
    for report in reports:
        processes[report.process].append(report.memory)
    return max(memory[-1] - memory[len(memory) // 4] for memory in processes.values())


def memory(reports: Sequence[Report], most: float) -> list[str]:
    """Checks that no process's memory grows by more than ``most`` bytes."""
    grown = growth(reports)
    return [f"a process has grown by {grown / 1e6:.1f} MB"] if grown > most else []


def unsent(reports: Sequence[Report]) -> tuple[float, float]:
    """The largest norms of unsent gradients, in the first and in the second half of the reports."""
    middle = (len(reports) + 1) // 2
    norms = [report.unsent for report in reports]
    return max(norms[:middle]), max(norms[middle:], default=0.0)


def residuals(reports: Sequence[Report]) -> list[str]:
    """Checks that unsent gradients do not grow."""
    first, second = unsent(reports)
    if second <= BOUNDED * first:
        return []
    return [f"the norm of unsent gradients grew from at most {first:.3g} to {second:.3g}"]


def slowdown(reports: Sequence[Report]) -> float:
    """The largest ratio in a run of the median step time in the last third to that in the first third."""
    runs: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        if report.rank == 0:
            runs[report.run].append(report.seconds)
    ratios = [1.0]
    for seconds in runs.values():
        ratio = _later([b - a for a, b in itertools.pairwise(seconds)])
        if ratio is not None:
            ratios.append(ratio)
    return max(ratios)


def _later(times: Sequence[float]) -> float | None:
    """The ratio of the median of the last third to that of the first; None for fewer than 30 numbers."""
    third = len(times) // 3
    if third < 10:
        return None
    first, last = sorted(times[:third]), sorted(times[-third:])
    return last[third // 2] / first[third // 2]
