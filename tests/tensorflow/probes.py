"""Gradients that are known, sent through stock Horovod's tape, and what they must become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.kernels.oracle import OracleKernels

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


class Simulation:
    """All ranks' compressors in one process, by the oracle."""

    def __init__(self, codec: Codec, feedback: ErrorFeedback, size: int, seed: int) -> None:
        self._codec, self._feedback, self._seed = codec, feedback, seed
        self._kernels = OracleKernels()
        self._step = 0
        self.residuals = [
            [np.zeros(math.prod(shape), np.float32) for shape in SHAPES] for _ in range(size)
        ]

    def sum(self, gradients: Sequence[Sequence[np.ndarray]], scale: float) -> list[np.ndarray]:
        """What every rank's gradients become in one step."""
        return [self._sum_one(i, [g[i] for g in gradients], scale) for i in range(len(SHAPES))] + (
            self._end()
        )

    def _sum_one(self, index: int, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        shape = SHAPES[index]
        if math.prod(shape) < THRESHOLD:
            return np.float32(scale) * np.sum(gradients, axis=0)
        payloads = np.empty((len(gradients), self._codec.payload_bytes(shape)), np.uint8)
        for rank, gradient in enumerate(gradients):
            self._kernels.encode(
                self._codec,
                shape,
                gradient.reshape(-1),
                payloads[rank],
                feedback=self._feedback,
                residual=self.residuals[rank][index] if self._feedback.enabled else None,
                noise=NoiseKey(self._seed, rank, index, self._step),
            )
        out = np.empty(math.prod(shape), np.float32)
        self._kernels.decode_sum(self._codec, shape, payloads, out, step=self._step, scale=scale)
        return out.reshape(shape)

    def _end(self) -> list[np.ndarray]:
        self._step += 1
        return []


def assert_same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Encoded gradients bit for bit; Horovod adds the others in an order of its own."""
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        if left.size < THRESHOLD:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(left, right), f"gradient {index}"
