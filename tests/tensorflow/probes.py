"""Gradients that are known, sent through stock Horovod's tape, and what they must become."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.codecs import Codec, ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.kernels.oracle import OracleKernels
from hvd_compress.tensorflow import Compressor
from tests.integer_sums import integer_sum

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
        if math.prod(SHAPES[index]) < THRESHOLD:
            return np.float32(scale) * np.sum(gradients, axis=0)
        return self._exchange(index, gradients, scale)

    def _exchange(self, index: int, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        shape = SHAPES[index]
        payloads = [
            self._encode(gradient, shape, self.residuals[rank][index], index, rank)
            for rank, gradient in enumerate(gradients)
        ]
        return self._decode(payloads, shape, scale)

    def _encode(
        self,
        numbers: np.ndarray,
        shape: tuple[int, ...],
        residual: np.ndarray,
        index: int,
        stream: int,
    ) -> np.ndarray:
        payload = np.empty(self._codec.payload_bytes(shape), np.uint8)
        self._kernels.encode(
            self._codec,
            shape,
            numbers.reshape(-1),
            payload,
            feedback=self._feedback,
            residual=residual if self._feedback.enabled else None,
            noise=NoiseKey(self._seed, stream, index, self._step),
        )
        return payload

    def _decode(
        self, payloads: Sequence[np.ndarray], shape: tuple[int, ...], scale: float
    ) -> np.ndarray:
        out = np.empty(math.prod(shape), np.float32)
        self._kernels.decode_sum(
            self._codec, shape, np.stack(payloads), out, step=self._step, scale=scale
        )
        return out.reshape(shape)

    def _end(self) -> list[np.ndarray]:
        self._step += 1
        return []


def _part(index: int, owner: int, owners: int) -> slice:
    count, grain = math.prod(SHAPES[index]), 1024
    part, grains = (owner - index) % owners, math.ceil(count / grain)
    begin, end = (p * grains // owners * grain for p in (part, part + 1))
    return slice(min(begin, count), min(end, count))


class TwoShotSimulation(Simulation):
    """The same for the two-shot exchange, written down from ``docs/exchanges.md``."""

    def __init__(self, codec: Codec, feedback: ErrorFeedback, size: int, seed: int) -> None:
        super().__init__(codec, feedback, size, seed)
        self.size = size
        self.owned = [np.zeros(math.prod(shape), np.float32) for shape in SHAPES]

    def part(self, index: int, rank: int) -> slice:
        """The elements of a gradient that a rank owns."""
        return _part(index, rank, self.size)

    def _exchange(self, index: int, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        flats = [gradient.reshape(-1) for gradient in gradients]
        out = np.empty_like(flats[0])
        for owner in range(self.size):
            part = self.part(index, owner)
            shape = (part.stop - part.start,)
            if shape == (0,):
                continue
            payloads = [
                self._encode(
                    flat[part],
                    shape,
                    self.residuals[rank][index][part],
                    index,
                    rank * self.size + owner,
                )
                for rank, flat in enumerate(flats)
            ]
            average = self._decode(payloads, shape, 1 / self.size)
            again = self._encode(
                average, shape, self.owned[index][part], index, self.size**2 + owner
            )
            out[part] = self._decode([again], shape, scale * self.size)
        return out.reshape(SHAPES[index])


class HierarchicalSimulation(Simulation):
    """The same for the hierarchical exchange; ``owned`` are the residuals of each host."""

    def __init__(
        self, codec: Codec, feedback: ErrorFeedback, size: int, local: int, seed: int
    ) -> None:
        super().__init__(codec, feedback, size, seed)
        self.local = local
        self.residuals = [[np.zeros(0, np.float32)] * len(SHAPES)] * size
        self.owned = [
            [np.zeros(math.prod(shape), np.float32) for shape in SHAPES]
            for _ in range(size // local)
        ]

    def part(self, index: int, rank: int) -> slice:
        """The elements of a gradient that a rank owns on its host."""
        return _part(index, rank % self.local, self.local)

    def _exchange(self, index: int, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        flats = [gradient.reshape(-1) for gradient in gradients]
        out = np.empty_like(flats[0])
        for place in range(self.local):
            part = self.part(index, place)
            shape = (part.stop - part.start,)
            if shape == (0,):
                continue
            payloads = []
            for host, kept in enumerate(self.owned):
                first = host * self.local
                total = np.zeros(shape, np.float32)
                for flat in flats[first : first + self.local]:
                    total += flat[part]
                total *= np.float32(1 / self.local)
                rank = first + place
                payloads.append(self._encode(total, shape, kept[index][part], index, rank))
            out[part] = self._decode(payloads, shape, scale * self.local)
        return out.reshape(SHAPES[index])


class IntegerSumSimulation(Simulation):
    """The same for the integer sum."""

    def _exchange(self, index: int, gradients: Sequence[np.ndarray], scale: float) -> np.ndarray:
        assert isinstance(self._codec, LevelCodec)
        out = integer_sum(
            self._codec,
            self._feedback,
            [gradient.reshape(-1) for gradient in gradients],
            [kept[index] for kept in self.residuals],
            [NoiseKey(self._seed, r, index, self._step) for r in range(len(gradients))],
            scale,
        )
        return out.reshape(SHAPES[index])


def assert_residuals(compressor: Compressor, simulation: Simulation) -> None:
    """Those of this rank, bit for bit; owners' too, where there are any."""
    for slot in compressor.slots:
        if slot.route.dense:
            continue
        expected = simulation.residuals[hvd.rank()][slot.index]
        assert np.array_equal(slot.residual.numpy(), expected), slot.label
        owned = np.zeros(0, np.float32)
        if isinstance(simulation, TwoShotSimulation):
            owned = simulation.owned[slot.index][simulation.part(slot.index, hvd.rank())]
        if isinstance(simulation, HierarchicalSimulation):
            kept = simulation.owned[hvd.rank() // simulation.local][slot.index]
            owned = kept[simulation.part(slot.index, hvd.rank())]
        assert np.array_equal(slot.owned.numpy(), owned), slot.label


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
