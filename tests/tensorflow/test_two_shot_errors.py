"""Two shots: ranks that fail, differ or leave."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    THRESHOLD,
    TwoShotSimulation,
    assert_same,
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
        if not arguments[-1].startswith("gradient.0."):
            return message
        changed = tf.bitwise.bitwise_xor(message[60], bits)
        return tf.tensor_scatter_nd_update(message, [[60]], [changed])

    setattr(compressor._collectives, shot, altered)
    return compressor, bits


@on_ranks(2, launcher="tensorflow")
def test_a_part_altered_on_its_way_to_its_owner() -> None:
    """Its owner sends zeros, so that all ranks fail in the same step, and go on."""
    compressor, bits = _altering("distribute")
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
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
    bits.assign(0)
    assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 2)))


@on_ranks(2, launcher="tensorflow")
def test_an_average_altered_on_its_way() -> None:
    compressor, bits = _altering("gather")
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    bits.assign(16)
    with pytest.raises(tf.errors.DataLossError, match=r"gradient.0: expected rank 0's average as"):
        exchange(targets(hvd.rank(), 1))
    bits.assign(0)
    assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 2)))


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_cannot_be_encoded() -> None:
    """Parts are cut for the shape of the first trace; a later one may know less."""
    compressor = hvdc.OneBit(threshold=0, exchange="two_shot")

    def exchange(value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = tf.reduce_sum(value * value) / 2
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [value])[0]

    def run(static: int | None, length: int) -> tf.Tensor:
        traced = tf.function(exchange, input_signature=[tf.TensorSpec([static])])
        return traced(tf.ones([length]))

    run(3000, 3000)
    length, message = (
        (3000, r"as its owner: gradient.0: expected rank 1's payload, got none"),
        (2990, r"gradient.0: expected a gradient of 3000 elements as when it was first traced"),
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        run(None, length)
    assert np.array_equal(run(None, 3000), tf.ones([3000]))


@on_ranks(2, launcher="tensorflow", alone=True)
def test_another_exchange() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD, exchange=("allgather", "two_shot")[hvd.rank()])
    message = r"(?s)gradient.0: .*through allgather.* on rank 0, .*through two_shot.* on rank 1"
    with pytest.raises(tf.errors.OpError, match=message):
        exchange_with(compressor, graph=True)(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow", alone=True)
def test_a_rank_that_joins() -> None:
    """The other goes on uncompressed; what its owner has not sent waits."""
    compressor = hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot")
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), hvd.size(), seed=0)
    exchange = exchange_with(compressor, graph=True)
    for step in range(2 if hvd.rank() == 0 else 4):
        everywhere = [targets(rank, step) for rank in range(hvd.size())]
        got = exchange(everywhere[hvd.rank()])
        if step < 2:
            assert_same(got, simulation.sum(everywhere, 0.5))
        else:
            for mine, alone in zip(got, everywhere[1], strict=True):
                np.testing.assert_allclose(mine, alone / 2, atol=1e-5)
    sent = compressor.counters.message_bytes
    hvd.join()
    for slot in compressor.slots:
        if slot.route.dense:
            continue
        part = simulation.part(slot.index, hvd.rank())
        assert np.array_equal(slot.owned, simulation.owned[slot.index][part])
        residual = simulation.residuals[hvd.rank()][slot.index]
        np.testing.assert_allclose(slot.residual, residual, atol=1e-5)
    assert compressor.counters.message_bytes == sent
