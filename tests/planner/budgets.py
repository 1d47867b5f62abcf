"""Trials that a busy machine does not end early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hvd_compress.planner import planner, trials

MOST_STEPS = planner._FIRST + 6 * sum(1 + steps for steps, _ in trials.ROUNDS)
"""Steps within which there is a plan: those before the probes, and all rounds with six plans at most,
each with the step of the change to it. So many only where noise hides the plans' order, and the budget is
large."""


@contextmanager
def unlimited() -> Iterator[None]:
    """Planners that are made meanwhile try several plans, however much of a budget probes have taken."""
    stock = planner.Trials
    planner.Trials = partial(stock, budget=1e9)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        planner.Trials = stock  # type: ignore[misc]
