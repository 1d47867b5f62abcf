"""Steps that a script throws away."""

from __future__ import annotations

import tempfile
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
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
        hvdc.ECQ(norm="l2", threshold=THRESHOLD),
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
    """The residuals are those from before the step, bit for bit, and stay so."""
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


@on_ranks(2, launcher="tensorflow")
def test_residuals_that_were_restored_since() -> None:
    """A checkpoint, or the residuals of all ranks, prevent ``drop_step()`` until the next exchange."""
    compressor = hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot")
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    with tempfile.TemporaryDirectory() as folder:
        own = tf.train.Checkpoint(compressor=compressor).write(f"{folder}/{hvd.rank()}")
        everybodys = hvd.allgather_object(own, name="paths")
        for restore in (
            compressor.reset,
            lambda: tf.train.Checkpoint(compressor=compressor).read(own),
            lambda: compressor.load_resized(everybodys),
        ):
            exchange(targets(hvd.rank(), 1))
            restore()
            restored = kept_by(compressor)
            with pytest.raises(tf.errors.FailedPreconditionError, match="drop_step: expected res"):
                compressor.drop_step()
            assert _same(kept_by(compressor), restored)
        hvd.allreduce(tf.zeros(1), name="before the folder goes")
    exchange(targets(hvd.rank(), 2))
    compressor.drop_step()
    assert _same(kept_by(compressor), restored)
