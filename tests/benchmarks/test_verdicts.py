"""When a statement holds, does not hold, or cannot be told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import Interval
from benchmarks.verdicts import (
    SAME_BITS,
    SAME_POINTS,
    Verdict,
    detectable,
    judge,
    mostly,
    same,
    told,
)


def test_one_margin() -> None:
    """Three seeds: the interval's ends are 4.303 standard errors from the mean."""
    found = judge([1.0, 2.0, 3.0])
    error = 4.302653 / math.sqrt(3)
    assert found.margin == pytest.approx((2, 2 - error, 2 + error), abs=1e-3)
    assert (found.verdict, found.seeds) == (Verdict.UNKNOWN, 3)
    assert judge([1.5, 2.0, 2.5]).verdict == Verdict.HOLDS
    assert judge([-1.5, -2.0, -2.5]).verdict == Verdict.FAILS


def test_each_margin_has_to_hold_and_one_that_fails_is_enough() -> None:
    good, open_, bad = [1.5, 2.0, 2.5], [1.0, 2.0, 3.0], [-9.0, -9.1, -9.2]
    assert judge(good, good).verdict == Verdict.HOLDS
    assert judge(good, open_).verdict == Verdict.UNKNOWN
    assert judge(good, open_, bad).verdict == Verdict.FAILS
    assert judge(good, open_).margin == judge(open_).margin


def test_one_of_many_margins_below_zero_may_be_chance() -> None:
    """Its own interval of 95% is below zero, that of 99.5% is not."""
    low = [-1.2, -1.8, -2.4]
    assert judge(low).verdict == Verdict.FAILS
    assert judge(low, *[[3.0, 3.1, 3.2]] * 9).verdict == Verdict.UNKNOWN


def test_trainings_that_diverge_and_single_seeds_tell_nothing() -> None:
    assert judge([1.0]).verdict == Verdict.UNKNOWN
    assert judge([1.0, 1.1, float("nan")]).verdict == Verdict.UNKNOWN


def test_a_margin_without_variance_takes_six_seeds_and_more_beside_others() -> None:
    """By a two-sided sign test: five equal signs have a chance of 1/16, six of 1/32, seven of 1/64."""
    assert [judge([1.0] * n).verdict for n in (3, 5)] == [Verdict.UNKNOWN] * 2
    assert judge([1.0] * 6).verdict == Verdict.HOLDS
    assert judge([-1.0] * 6).verdict == Verdict.FAILS
    assert judge([-1.0] * 6, [3.0, 3.1, 3.2]).verdict == Verdict.UNKNOWN
    assert judge([-1.0] * 7, [3.0, 3.1, 3.2]).verdict == Verdict.FAILS
    assert judge([0.0] * 9).verdict == Verdict.UNKNOWN


def test_results_are_the_same_where_the_whole_interval_lies_within_the_margin() -> None:
    assert same(Interval(0.001, 0.008), SAME_BITS) and same(Interval(-0.001, 0.008), SAME_BITS)
    assert not same(Interval(0.001, 0.0095), SAME_BITS)
    assert not same(Interval(0.0, 0.2), SAME_POINTS)


def test_a_method_beside_another_one_in_words() -> None:
    """Losses of text are better where they are smaller; a difference within the margin is none."""
    losses = np.array([0.03, 0.04, 0.035])
    assert told(losses, SAME_BITS, larger_is_better=False) == "worse"
    assert told(-losses, SAME_BITS, larger_is_better=False) == "better"
    assert told(losses, SAME_BITS, larger_is_better=True) == "better"
    assert told(losses / 10, SAME_BITS, larger_is_better=False) == "the same"
    assert told([0.0, 0.04, -0.03], SAME_BITS, larger_is_better=False) == "cannot tell"
    assert told([0.0, 0.0, 0.0], SAME_POINTS, larger_is_better=True) == "cannot tell"
    assert told([0.0] * 7, SAME_POINTS, larger_is_better=True) == "the same"
    assert told([0.0, math.nan, 0.0], SAME_BITS, larger_is_better=False) == "diverges"


@pytest.mark.parametrize(
    ("events", "runs", "verdict"),
    [
        (3, 3, Verdict.UNKNOWN),
        (0, 5, Verdict.UNKNOWN),
        (6, 6, Verdict.HOLDS),
        (0, 6, Verdict.FAILS),
        (30, 60, Verdict.UNKNOWN),
    ],
)
def test_what_most_trainings_do(events: int, runs: int, verdict: Verdict) -> None:
    assert mostly(events, runs).verdict == verdict


def test_what_could_be_seen_is_seen_in_four_of_five_cases() -> None:
    margin = detectable(1.0, 5)
    drawn = np.random.default_rng(0).standard_normal((20_000, 5)) + margin
    seen = stats.ttest_1samp(drawn, 0, axis=1)
    assert np.mean((seen.pvalue < 0.05) & (seen.statistic > 0)) == pytest.approx(0.8, abs=0.01)
