"""The helpers that the tests of the compressor that chooses by itself share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8
from hvd_compress.exchanges.routing import Route
from hvd_compress.planner import planner
from hvd_compress.planner.measured import Measured
from hvd_compress.planner.plans import Candidate, PlannedTensor, RoutePlan, propose
from tests.tensorflow.probes import SHAPES, THRESHOLD, exchange_with, targets

EXACT = ("onebit", Route(Int8("linear"), ErrorFeedback()))
"""Codecs with full error feedback: what they do not send now they send later."""

CODECS = ("fp16", "int8", "onebit")
"""The default codecs, and one with residuals."""


def variables() -> list[tf.Variable]:
    """The sources whose gradients :func:`exchange_with` sends."""
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def start(**options: Any) -> hvdc.Auto:
    """A compressor for :data:`SHAPES`."""
    return hvdc.Auto(variables(), **{"threshold": THRESHOLD, "codecs": CODECS, **options})


@contextmanager
def deciding(plan: Callable[[list[Route]], Sequence[Route]]) -> Iterator[None]:
    """A context in which a function makes the plan of the routes of all plans, whatever is predicted."""

    def decide(tensors: Sequence[PlannedTensor], measured: Measured, bursts: Any) -> Candidate:
        candidates = propose(tensors, measured)
        routes = dict.fromkeys(route for one in candidates for route in one.plan)
        chosen: RoutePlan = tuple(plan(sorted(routes, key=str)))
        return dataclasses.replace(candidates[0], label="decided by the test", plan=chosen)

    with mock.patch.object(planner, "predicted_best", decide):
        yield


def by(codec: str, exchange: str = "allgather") -> Callable[[list[Route]], Route]:
    """The route of that codec and exchange."""

    def find(routes: list[Route]) -> Route:
        return next(
            r
            for r in routes
            if r.codec.name == codec and (r.uncompressed or r.exchange == exchange)
        )

    return find


class Course:
    """Gradients that were computed, and gradients that came back."""

    def __init__(self, compressor: hvdc.Compressor, **tape: Any) -> None:
        self.compressor = compressor
        self.exchange = exchange_with(compressor, graph=True, **tape)
        self.steps = 0
        self.due = [np.zeros(shape) for shape in SHAPES]
        self.sent = [np.zeros(shape) for shape in SHAPES]

    def step(self, scale: float = 1.0) -> list[np.ndarray]:
        """One step of known gradients, multiplied by ``scale``; what came back."""
        gradients = [targets(rank, self.steps) for rank in range(hvd.size())]
        got = self.exchange([np.float32(scale) * one for one in gradients[hvd.rank()]])
        for index in range(len(SHAPES)):
            self.due[index] += scale * sum(one[index] for one in gradients) / hvd.size()
            self.sent[index] += got[index]
        self.steps += 1
        return got


def everywhere(what: object) -> list[Any]:
    """Returns each rank's value, by rank."""
    return list(hvd.allgather_object(what, name="what ranks say"))
