"""Steps that a script throws away."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from tests.ranks import on_ranks
from tests.tensorflow.probes import SHAPES, THRESHOLD, exchange_with, kept_by, targets


def _same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def _compressors() -> list[Any]:
    return [
        hvdc.OneBit(threshold=THRESHOLD),
        hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot"),
        hvdc.ECQ(threshold=THRESHOLD, exchange="integer_sum"),
    ]


@on_ranks(2, launcher="tensorflow")
def test_residuals_are_those_before_the_dropped_step() -> None:
    for graph in (True, False):
        for compressor in _compressors():
            exchange = exchange_with(compressor, graph=graph)
            compressor.drop_step()  # There was none.
            exchange(targets(hvd.rank(), 0))
            before = kept_by(compressor)
            exchange(targets(hvd.rank(), 1))
            assert not _same(kept_by(compressor), before)
            compressor.drop_step()
            assert _same(kept_by(compressor), before)
            compressor.drop_step()
            assert _same(kept_by(compressor), before)
            assert {int(slot.exchanges) for slot in compressor.slots} <= {0, 2}
            exchange(targets(hvd.rank(), 2))
            assert not _same(kept_by(compressor), before)


@on_ranks(2, launcher="tensorflow")
def test_a_nonfinite_step_is_dropped_once() -> None:
    """Its residuals are those before, bit for bit, and stay so."""
    for compressor in _compressors():
        exchange = exchange_with(compressor, graph=True)
        exchange(targets(hvd.rank(), 0))
        before = kept_by(compressor)
        gradients = targets(hvd.rank(), 1)
        if hvd.rank() == 1:
            gradients[2][5] = np.inf
        exchange(gradients)
        assert _same(kept_by(compressor), before)
        compressor.drop_step()
        assert _same(kept_by(compressor), before)


@on_ranks(2, launcher="tensorflow")
def test_in_a_function() -> None:
    compressor = hvdc.OneBit(threshold=0)
    variable = tf.Variable(tf.zeros(SHAPES[0]))

    @tf.function
    def step(gradient: tf.Tensor, drop: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * gradient)
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        result = tape.gradient(loss, [variable])[0]
        if drop:
            compressor.drop_step()
        return result

    step(targets(hvd.rank(), 0)[0], tf.constant(False))
    for n in range(1, 20):
        before = kept_by(compressor)
        step(targets(hvd.rank(), n)[0], tf.constant(True))
        assert _same(kept_by(compressor), before)
    step(targets(hvd.rank(), 20)[0], tf.constant(False))
    assert not _same(kept_by(compressor), before)
