"""Gradients that are known, sent through stock Horovod's tape, and what they must become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges import reference
from hvd_compress.tensorflow import Compressor

SHAPES = ((40, 70), (10,), (3000,), (8, 3, 5, 5))
THRESHOLD = 100
"""The second gradient stays below it."""


def targets(rank: int, step: int) -> list[np.ndarray]:
    """Gradients of one rank at one step, the same wherever they are asked for."""
    generator = np.random.default_rng(1000 * rank + step)
    return [generator.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def exchange_with(
    compression: Any, *, graph: bool, **options: Any
) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """A step whose gradients are its arguments: the gradient of ``sum(p * t)`` is ``t``, exactly."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def step(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(v * t) for v, t in zip(variables, gradients, strict=True)]
            loss = tf.add_n(parts)
        tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
        return tape.gradient(loss, variables)

    run = tf.function(step) if graph else step
    return lambda gradients: [g.numpy() for g in run([tf.constant(g) for g in gradients])]


NAMES = tuple(f"gradient.{index}" for index in range(len(SHAPES)))


class Simulation(reference.Simulation):
    """The reference of gradients in a list; Horovod adds up those below the threshold."""

    def __init__(
        self, exchange: str, codec: Codec, feedback: ErrorFeedback, size: int, **options: Any
    ) -> None:
        shapes = dict(zip(NAMES, SHAPES, strict=True))
        super().__init__(exchange, codec, feedback, shapes, size, **options)

    def sum(self, gradients: Sequence[Sequence[np.ndarray]], scale: float) -> list[np.ndarray]:
        """Returns the sums that every rank's gradients become in one step."""
        made = self.average([dict(zip(NAMES, one, strict=True)) for one in gradients], scale)
        return [
            made[name]
            if made[name].size >= THRESHOLD
            else np.float32(scale) * np.sum(every, axis=0)
            for name, every in zip(NAMES, zip(*gradients, strict=True), strict=True)
        ]


def assert_residuals(compressor: Compressor, simulation: Simulation) -> None:
    """Fails unless this rank's residuals, and those of its owned parts, are the reference's bits."""
    for slot in compressor.slots:
        if slot.route.uncompressed:
            continue
        mine = simulation.residuals[hvd.rank()], simulation.owned[hvd.rank()]
        for got, expected in zip((slot.residual, slot.owned), mine, strict=True):
            assert np.array_equal(got.numpy(), expected.get(slot.label, [])), slot.label


def kept_by(compressor: Compressor) -> list[np.ndarray]:
    """Copies of all residuals of this rank."""
    return [
        kept.numpy().copy() for slot in compressor.slots for kept in (slot.residual, slot.owned)
    ]


def assert_same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Encoded gradients bit for bit; Horovod adds the others in an order of its own."""
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        if left.size < THRESHOLD:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(left, right), f"gradient {index}"


@cache
def process_set(*ranks: int) -> hvd.ProcessSet:
    """Returns a process set for all tests of a job: Horovod accepts each set once."""
    return hvd.add_process_set(list(ranks))
