"""Exchanges in several stages: ranks that fail between them, and messages altered in transit."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    THRESHOLD,
    exchange_with,
    kept_by,
    targets,
)


def _altering(shot: str) -> tuple[hvdc.Compressor, tf.Variable]:
    """A compressor, and the bits that its network flips in what comes back of gradient 0 in one shot."""
    compressor = hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot")
    bits = tf.Variable(0, dtype=tf.uint8)
    call = getattr(compressor._collectives, shot)

    def altered(*arguments: Any) -> tf.Tensor:
        message = call(*arguments)
        if not arguments[-1].startswith("bucket.0."):
            return message
        changed = tf.bitwise.bitwise_xor(message[60], bits)
        return tf.tensor_scatter_nd_update(message, [[60]], [changed])

    setattr(compressor._collectives, shot, altered)
    return compressor, bits


@on_ranks(2, launcher="tensorflow")
def test_a_part_altered_on_its_way_to_its_owner() -> None:
    """The part's owner sends zeros, so that all ranks fail in the same step, and continue."""
    compressor, bits = _altering("all_to_all")
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    before = kept_by(compressor)
    bits.assign(16 if hvd.rank() == 1 else 0)
    message = (
        r"gradient.0: expected rank 1's average, got none",
        r"as its owner: gradient.0: expected rank 0's payload as it was sent",
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        exchange(targets(hvd.rank(), 1))
    for left, right in zip(kept_by(compressor), before, strict=True):
        assert np.array_equal(left, right)
    bits.assign(0)
    assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 2)))


@on_ranks(2, launcher="tensorflow")
def test_an_average_altered_on_its_way() -> None:
    compressor, bits = _altering("all_gather")
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    bits.assign(16)
    with pytest.raises(tf.errors.DataLossError, match=r"gradient.0: expected rank 0's average as"):
        exchange(targets(hvd.rank(), 1))
    bits.assign(0)
    assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 2)))


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_cannot_be_encoded() -> None:
    """All ranks fail and go on, even if a later trace knows less of the shapes."""
    compressor = hvdc.OneBit(threshold=0, exchange="two_shot")
    variable = tf.Variable(tf.ones([3000]), shape=[None])

    def exchange(static: int | None) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.ensure_shape(variable, [static])
            loss = tf.reduce_sum(value * value) / 2
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [variable])[0]

    def run(static: int | None, length: int) -> tf.Tensor:
        variable.assign(tf.ones([length]))
        return tf.function(lambda: exchange(static))()

    run(3000, 3000)
    before = kept_by(compressor)
    length, message = (
        (3000, r"as its owner: gradient.0: expected rank 1's payload, got none"),
        (2990, r"gradient.0: expected a gradient of 3000 elements as when it was first traced"),
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        run(None, length)
    for left, right in zip(kept_by(compressor), before, strict=True):
        assert np.array_equal(left, right)
    assert np.isfinite(run(None, 3000)).all()
    assert np.array_equal(run(None, 3000), tf.ones([3000]))
