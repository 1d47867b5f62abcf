"""Judges whether a statement holds, does not hold, or cannot be decided with the seeds that were run.

A statement is given by *margins*: for each seed, the distance of the result from those that would
contradict the statement, such as the loss of one method minus that of another with the same seed. The
statement is that the mean of every margin is above zero. With Student's t intervals of 95%:

- it *holds* if the interval of every margin lies above zero;
- it *does not hold* if the interval of some margin lies below zero (with k margins, the intervals are of
  100 - 5 / k percent, after Bonferroni, because any of them may be the one);
- otherwise, the verdict is *cannot tell*: there are too few seeds.

A margin that is the same with every seed has no variance for an interval. A sign test decides instead,
which takes six seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.intervals import Interval, mean

CONFIDENCE = 0.95
SAME_POINTS = 0.2
"""Percentage points of accuracy; see :func:`same`."""
SAME_BITS = 0.01
"""Bits a byte of text; see :func:`same`."""
POWER = 0.8
"""The probability with which a difference of :attr:`Finding.detectable` is found."""


class Verdict(StrEnum):
    """The verdicts on a statement, in the order in which one overrides another."""

    FAILS = "does not hold"
    UNKNOWN = "cannot tell"
    HOLDS = "holds"


@dataclass(frozen=True)
class Finding:
    """A verdict, with the margin that decided it.

    Attributes:
        verdict: the verdict.
        seeds: the number of seeds, or of trainings in :func:`mostly`.
        margin: the mean and the ends of the interval, three times the same number where all seeds share it;
            None if there is no interval.
        detectable: the smallest mean margin that as many seeds with the same variance would show with a
            probability of 80%; None if there is no such number.
    """

    verdict: Verdict
    seeds: int
    margin: tuple[float, float, float] | None = None
    detectable: float | None = None


def judge(*margins: Sequence[float] | np.ndarray) -> Finding:
    """Judges a statement by the rule of this module.

    Args:
        margins: one or several, shape=(seeds,). With a number that is not finite, of a training that
            diverged, a margin decides nothing.
    """
    found = [_part(np.asarray(one, np.float64), len(margins)) for one in margins]
    order = list(Verdict)
    # Among margins with the same verdict, the one nearest to another verdict in units of its uncertainty.
    return min(found, key=lambda one: (order.index(one.verdict), _strength(one)))


def same(difference: Interval, margin: float) -> bool:
    """Whether a page may call two results the same: the difference's interval lies within the margin."""
    return -margin < difference.low and difference.high < margin


def told(differences: Sequence[float] | np.ndarray, margin: float, larger_is_better: bool) -> str:
    """Names a method's results beside those of another one, by :func:`judge`.

    Args:
        differences: the differences to the other method's results, paired by seed, shape=(seeds,).
        margin: the largest difference that counts as none.
        larger_is_better: whether a positive difference is an improvement.

    Returns:
        "the same", "better", "worse", "cannot tell", or "diverges" where a result is not finite.
    """
    found = np.asarray(differences, np.float64)
    if not np.isfinite(found).all():
        return "diverges"
    if judge(margin - found, margin + found).verdict == Verdict.HOLDS:
        return "the same"
    gains = found if larger_is_better else -found
    words = {Verdict.HOLDS: "better", Verdict.FAILS: "worse", Verdict.UNKNOWN: "cannot tell"}
    return words[judge(gains).verdict]


def mostly(events: int, runs: int) -> Finding:
    """Judges whether more than half of all trainings have an event, by Clopper and Pearson's interval."""
    from scipy.stats import binomtest

    found = binomtest(events, runs).proportion_ci(CONFIDENCE, method="exact")
    share, low, high = (_digits(float(one) - 0.5) for one in (events / runs, found.low, found.high))
    interval = (share, low, high)
    return Finding(_of(interval[1], interval[2]), runs, interval)


def detectable(deviation: float, seeds: int) -> float:
    """The mean that Student's t test tells from zero with a power of 80%, for a standard deviation."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, seeds - 1))
    shift = brentq(lambda x: nct.sf(quantile, seeds - 1, x) - POWER, 0.1, 1e3)
    return float(shift) * deviation / math.sqrt(seeds)


def _part(margin: np.ndarray, parts: int) -> Finding:
    if margin.size < 2 or not np.isfinite(margin).all():
        return Finding(Verdict.UNKNOWN, margin.size)
    if np.ptp(margin) == 0:
        return _constant(float(margin[0]), margin.size, parts)
    narrow = mean(margin, CONFIDENCE)
    wide = mean(margin, 1 - (1 - CONFIDENCE) / parts)
    verdict = _of(narrow.low, wide.high)
    least = detectable(float(margin.std(ddof=1)), margin.size)
    found = (_digits(narrow.mean), _digits(narrow.low), _digits(narrow.high))
    return Finding(verdict, margin.size, found, _digits(least))


def _constant(margin: float, seeds: int, parts: int) -> Finding:
    """Judges by a two-sided sign test a margin that all seeds share."""
    chance, alpha, verdict = 2.0 ** (1 - seeds), 1 - CONFIDENCE, Verdict.UNKNOWN
    if margin > 0 and chance < alpha:
        verdict = Verdict.HOLDS
    elif margin < 0 and chance < alpha / parts:
        verdict = Verdict.FAILS
    return Finding(verdict, seeds, (_digits(margin),) * 3)


def _of(low: float, high: float) -> Verdict:
    if low > 0:
        return Verdict.HOLDS
    return Verdict.FAILS if high < 0 else Verdict.UNKNOWN


def _digits(number: float) -> float:
    """Rounds to four digits, because further ones differ between versions of SciPy."""
    return float(f"{number:.4g}")


def _strength(one: Finding) -> float:
    if one.margin is None:
        return -math.inf
    middle, low, _ = one.margin
    return middle / (middle - low) if middle > low else math.copysign(math.inf, middle)
