"""Trials that a busy machine does not end early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hvd_compress.planner import planner


@contextmanager
def unlimited() -> Iterator[None]:
    """Planners that are made meanwhile try several plans, however much of a budget probes have taken."""
    stock = planner.Trials
    planner.Trials = partial(stock, budget=1e9)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        planner.Trials = stock  # type: ignore[misc]
