"""Dropped steps, checkpoints, and ranks that differ."""

from __future__ import annotations

import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ECQ
from tests.ranks import on_ranks
from tests.tensorflow.probes import SHAPES, THRESHOLD, assert_same, exchange_with, targets


def _residuals(compressor: hvdc.Compressor) -> list[np.ndarray]:
    return [slot.residual.numpy() for slot in compressor.slots if not slot.route.dense]


@on_ranks(2, launcher="tensorflow")
def test_a_non_finite_gradient_drops_the_step_on_all_ranks() -> None:
    for index in (0, 3):  # the first to be sent, and the last
        compressor = hvdc.OneBit(threshold=THRESHOLD)
        exchange = exchange_with(compressor, graph=True)
        exchange(targets(hvd.rank(), 0))
        before = _residuals(compressor)
        gradients = targets(hvd.rank(), 1)
        if hvd.rank() == 1:
            gradients[index].reshape(-1)[5] = np.inf
        got = exchange(gradients)
        assert not np.isfinite(got[index]).all()
        assert np.isfinite(got[2]).all()
        for left, right in zip(_residuals(compressor), before, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    first = hvdc.Compressor(ECQ(), hvdc.ErrorFeedback(0.01, 1.0), threshold=THRESHOLD)
    exchange = exchange_with(first, graph=True)
    for step in range(2):
        exchange(targets(hvd.rank(), step))
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=first).write(os.path.join(folder, "state"))
        resumed = hvdc.Compressor(ECQ(), hvdc.ErrorFeedback(0.01, 1.0), threshold=THRESHOLD)
        tf.train.Checkpoint(compressor=resumed).read(path)
        again = exchange_with(resumed, graph=True)
        for step in range(2, 4):
            gradients = targets(hvd.rank(), step)
            assert_same(again(gradients), exchange(gradients))


@on_ranks(2, launcher="tensorflow", alone=True)
def test_another_codec() -> None:
    compressor = (hvdc.OneBit, hvdc.Int8)[hvd.rank()](threshold=THRESHOLD)
    with pytest.raises(tf.errors.OpError, match=r"(?s)gradient.0: .*OneBit.* on rank 0, .*Int8"):
        exchange_with(compressor, graph=True)(targets(hvd.rank(), 0))


@on_ranks(2, launcher="tensorflow", alone=True)
def test_a_gradient_that_only_one_rank_compresses() -> None:
    compressor = hvdc.OneBit(threshold=(100, 1000)[hvd.rank()])
    with pytest.raises(tf.errors.OpError, match=r"(?s)gradient.3: .*on rank 0, .*NoCompression"):
        exchange_with(compressor, graph=True)(targets(hvd.rank(), 0))


# AutoGraph raises an exception of its own in the place of what is raised while it traces.


@on_ranks(2, launcher="tensorflow")
def test_operations_that_cannot_be_done_fail_when_traced() -> None:
    for operation in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        exchange = exchange_with(hvdc.OneBit(threshold=THRESHOLD), graph=True, op=operation)
        with pytest.raises(Exception, match=r"ExchangeError: .*expected op=Average or op=Sum"):
            exchange(targets(hvd.rank(), 0))


@on_ranks(1, launcher="tensorflow")
def test_wrong_uses() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        hvdc.OneBit(group=100)
    with pytest.raises(hvdc.ExchangeError, match="registered process set"):
        hvdc.OneBit(process_set=hvd.ProcessSet([0]))
    with pytest.raises(hvdc.ExchangeError, match=r"in a tf\.function"):
        hvdc.OneBit().compress(tf.zeros([5000]))
    compressor = hvdc.OneBit(threshold=0)
    tf.function(lambda: compressor.compress(tf.zeros(SHAPES[0]))[0]).get_concrete_function()
    other = tf.function(lambda: compressor.compress(tf.zeros(SHAPES[2]))[0])
    with pytest.raises(Exception, match="make a compressor for each model"):
        other.get_concrete_function()
    assert compressor != hvdc.OneBit(threshold=0)
