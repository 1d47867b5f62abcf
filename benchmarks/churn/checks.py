"""What has to hold however ranks come and go."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.churn.reports import Report

KEPT = 1e-3
"""The largest part of what ranks have not sent that may be missing; a lost residual is much more."""

ROUNDING = 1e-6
"""The same in proportion to the sum of all gradients, for rounding."""

LEARNED = 0.9
"""The largest loss at the end, in proportion to that at the start."""

GROWTH = 30e6
"""Bytes by which a process may grow after its first quarter, where ranks come and go."""

STEADY_GROWTH = 5e6
"""The same where nothing happens: one that leaks a kilobyte in each of 20,000 steps grows by more."""

BOUNDED = 2.0
"""The largest norm of what is unsent in the second half of the steps, in proportion to the first half's."""


def replicas(reports: Sequence[Report]) -> list[str]:
    """Ranks whose weights differ at the same commit."""
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
    """Gradients that were neither applied nor are still to be sent."""
    return [
        f"step {report.step}, rank {report.rank}: gradients of norm {report.missing:.3g} are neither "
        f"applied nor unsent; what is unsent has norm {report.unsent:.3g}"
        for report in reports
        if report.missing is not None
        and report.missing > KEPT * report.unsent + ROUNDING * report.gradients
    ]


def compression(reports: Sequence[Report], most: float) -> list[str]:
    """Intervals whose messages were longer than they are with the compression."""
    return [
        f"step {report.step}, rank {report.rank}: messages have {report.sent:.3f} of the uncompressed "
        f"bytes, expected at most {most}"
        for report in reports
        if report.sent > most
    ]


def learning(reports: Sequence[Report]) -> list[str]:
    """A loss that does not come down."""
    first, last = mean_loss(reports[:20]), mean_loss(reports[-20:])
    if last <= LEARNED * first:
        return []
    return [f"the loss went from {first:.3f} to {last:.3f}, expected at most {LEARNED} of it"]


def mean_loss(reports: Sequence[Report]) -> float:
    """The mean loss of some reports."""
    return sum(report.loss for report in reports) / len(reports)


def growth(reports: Sequence[Report]) -> float:
    """Bytes by which that process's memory grew most, after the first quarter of its reports."""
    processes: dict[int, list[int]] = defaultdict(list)
    for report in reports:
        processes[report.process].append(report.memory)
    return max(memory[-1] - memory[len(memory) // 4] for memory in processes.values())


def memory(reports: Sequence[Report], most: float) -> list[str]:
    """Processes whose memory grows by more than so many bytes."""
    grown = growth(reports)
    return [f"a process has grown by {grown / 1e6:.1f} MB"] if grown > most else []


def unsent(reports: Sequence[Report]) -> tuple[float, float]:
    """The largest norms of what is unsent, in the first and in the second half of the reports."""
    middle = (len(reports) + 1) // 2
    norms = [report.unsent for report in reports]
    return max(norms[:middle]), max(norms[middle:], default=0.0)


def residuals(reports: Sequence[Report]) -> list[str]:
    """What is unsent and gets more and more."""
    first, second = unsent(reports)
    if second <= BOUNDED * first:
        return []
    return [f"what is unsent grew from at most {first:.3g} to {second:.3g}, in norm"]


def slowdown(reports: Sequence[Report]) -> float:
    """The largest ratio, over runs, of a step's median time in the last third to that in the first one."""
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
    """The median of the last third over that of the first; None of fewer than 30."""
    third = len(times) // 3
    if third < 10:
        return None
    first, last = sorted(times[:third]), sorted(times[-third:])
    return last[third // 2] / first[third // 2]
