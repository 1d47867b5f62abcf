"""What the tests of the compressor that chooses by itself have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8
from hvd_compress.exchange.routing import DENSE
from tests.planner.budgets import MOST_STEPS
from tests.tensorflow.probes import SHAPES, THRESHOLD, exchange_with, targets

EXACT = ("onebit", (Int8("linear"), ErrorFeedback()))
"""Codecs with full error feedback: what they do not send now they send later."""


class Course:
    """Gradients that were computed, and gradients that came back."""

    def __init__(self, compressor: hvdc.Auto, *, graph: bool = True, **tape: Any) -> None:
        self.compressor = compressor
        self._exchange = exchange_with(compressor, graph=graph, **tape)
        self.steps = 0
        self.due = [np.zeros(shape) for shape in SHAPES]
        self.sent = [np.zeros(shape) for shape in SHAPES]

    def step(self, scale: float = 1.0) -> list[np.ndarray]:
        """One step of known gradients, multiplied by ``scale``; what came back."""
        gradients = [targets(rank, self.steps) for rank in range(hvd.size())]
        got = self._exchange([np.float32(scale) * one for one in gradients[hvd.rank()]])
        for index in range(len(SHAPES)):
            self.due[index] += scale * sum(one[index] for one in gradients) / hvd.size()
            self.sent[index] += got[index]
        self.steps += 1
        return got

    def until_planned(self, each: Callable[[], object] = lambda: None) -> None:
        """Steps until there is a plan. Later ones might measure anew on a busy machine."""
        for _ in range(MOST_STEPS):
            self.step()
            each()
            if self.compressor.settled:
                return
        raise AssertionError(self.compressor.explain())

    def assert_nothing_is_lost(self) -> None:
        """After a step of nothing but what had not been sent."""
        self.compressor._apply((DENSE,) * len(SHAPES))
        self.step(scale=0.0)
        assert self.compressor.residual_norm() == 0
        for sent, due in zip(self.sent, self.due, strict=True):
            np.testing.assert_allclose(sent, due, atol=1e-3)


def start(**options: Any) -> hvdc.Auto:
    """A compressor for :data:`SHAPES`."""
    return hvdc.Auto(**{"threshold": THRESHOLD, **options})


def everywhere(what: object) -> list[Any]:
    """What the ranks say, in their order."""
    return list(hvd.allgather_object(what, name="what ranks say"))


def every_change_of_way_keeps_every_gradient(ways: int, *, graph: bool = True) -> None:
    """Every gradient takes another way in every step, all of them in the end, and each its own."""
    exchanges = ("allgather", "two_shot", "hierarchical")
    compressor = start(codecs=EXACT, exchanges=exchanges)
    course = Course(compressor, graph=graph)
    course.step()
    choices = [slot.tensor.choices for slot in compressor.slots]
    assert [len(routes) for routes in choices] == [ways, 1, ways, ways]
    for turn in (*range(ways), 2, 0, 3, 1, 4, 0):
        plan = [routes[(turn + i) % len(routes)] for i, routes in enumerate(choices)]
        compressor._apply(tuple(plan))
        got = course.step()
        assert len({_digest(one) for one in everywhere(got)}) == 1
    assert compressor.residual_norm() > 0
    course.assert_nothing_is_lost()


def _digest(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)
