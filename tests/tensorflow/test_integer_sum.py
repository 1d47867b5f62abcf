"""The integer sum through a stock tape, against all ranks simulated by the oracle."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ECQ, ErrorFeedback, LevelCodec, Ternary
from hvd_compress.exchange.integer_sum import message_words
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    IntegerSumSimulation,
    assert_residuals,
    assert_same,
    exchange_with,
    kept_by,
    targets,
)

NONE = ErrorFeedback(alpha=0.0)
WEAK = ErrorFeedback(0.01, 1.0)
ROWS: list[tuple[LevelCodec, ErrorFeedback]] = [
    (Ternary(), NONE),
    (Ternary(bucket="tensor", clip=None), NONE),
    (Ternary(64), ErrorFeedback(0.1, 0.9)),
    (ECQ(), WEAK),
    (ECQ(2, "linf", "tensor"), NONE),
    (ECQ(100, "l2", 128), ErrorFeedback()),
]


def _start(**options: Any) -> hvdc.Compressor:
    return hvdc.ECQ(threshold=THRESHOLD, exchange="integer_sum", **options)


def _simulation() -> IntegerSumSimulation:
    return IntegerSumSimulation(ECQ(), WEAK, hvd.size(), seed=0)


def _gradients(step: int) -> list[list[np.ndarray]]:
    """Of all ranks; the scales of one rank are far above those of the others, in some steps."""
    factors = [np.float32(10.0 ** (step * (rank % 2))) for rank in range(hvd.size())]
    return [[f * g for g in targets(rank, step)] for rank, f in enumerate(factors)]


def _every_codec_matches_the_simulation(graph: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        compressor = hvdc.Compressor(
            codec, feedback, threshold=THRESHOLD, seed=7, exchange="integer_sum"
        )
        exchange = exchange_with(compressor, graph=graph)
        simulation = IntegerSumSimulation(codec, feedback, size, seed=7)
        for step in range(3):
            gradients = _gradients(step)
            assert_same(exchange(gradients[rank]), simulation.sum(gradients, 1 / size))
        if feedback.enabled:
            assert_residuals(compressor, simulation)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_in_graphs() -> None:
    _every_codec_matches_the_simulation(graph=True)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_eagerly() -> None:
    _every_codec_matches_the_simulation(graph=False)


@on_ranks(2, launcher="tensorflow")
def test_sum_predivide_groups_and_layers() -> None:
    for scale, options in (
        (1.0, {"op": hvd.Sum}),
        (0.5, {"gradient_predivide_factor": 2.0}),
        (0.5, {"groups": 2}),
    ):
        compressor = _start(layers={"gradient.2": "ecq"})
        exchange = exchange_with(compressor, graph=True, **options)
        simulation = _simulation()
        for step in range(2):
            gradients = _gradients(step)
            assert_same(exchange(gradients[hvd.rank()]), simulation.sum(gradients, scale))
        assert compressor.routes()["gradient.2"].exchange == "integer_sum"


@on_ranks(2, launcher="tensorflow")
def test_half_precision() -> None:
    for dtype in (tf.float16, tf.bfloat16):
        variable = tf.Variable(tf.zeros(SHAPES[0], dtype))
        compressor = _start()

        @tf.function
        def gradient(
            value: tf.Tensor,
            compressor: hvdc.Compressor = compressor,
            variable: tf.Variable = variable,
        ) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(variable * value, tf.float32))
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            return tape.gradient(loss, [variable])[0]

        simulation = _simulation()
        for step in range(3):
            sent = [[tf.cast(g, dtype) for g in targets(rank, step)] for rank in range(hvd.size())]
            everywhere = [[tf.cast(g, tf.float32).numpy() for g in one] for one in sent]
            expected = simulation.sum(everywhere, 0.5)[0]
            got = gradient(sent[hvd.rank()][0])
            assert got.dtype == dtype
            assert np.array_equal(got, tf.cast(expected, dtype))


@on_ranks(2, launcher="tensorflow")
def test_warm_up_and_zeros() -> None:
    exchange = exchange_with(_start(warmup_steps=1), graph=True)
    simulation = _simulation()
    for step in range(3):
        gradients = _gradients(step)
        if step == 1:
            for one in gradients:
                one[3][:] = 0
        got = exchange(gradients[hvd.rank()])
        if step:
            assert_same(got, simulation.sum(gradients, 0.5))
            assert got[3].any() == (step == 2)
        else:
            for left, right in zip(got, zip(*gradients, strict=True), strict=True):
                np.testing.assert_allclose(left, np.mean(right, axis=0), rtol=1e-6, atol=1e-6)


@on_ranks(3, launcher="tensorflow")
def test_counters_on_three_ranks_follow_the_formulas() -> None:
    compressor, simulation = _start(), _simulation()
    exchange = exchange_with(compressor, graph=True)
    for step in range(2):
        gradients = _gradients(step)
        assert_same(exchange(gradients[hvd.rank()]), simulation.sum(gradients, 1 / 3))
    size, message = hvd.size(), 4 * 10 + 3 * 4  # The small gradient, and three tokens.
    for index in (0, 2, 3):
        shape, codec = SHAPES[index], ECQ()
        message += 4 * codec.layout(shape).scales + 4 * message_words(codec, shape, size)
    counters = compressor.counters
    assert counters.message_bytes == 2 * message
    assert math.isclose(counters.wire_bytes, 2 * 2 * (size - 1) / size * message)
    assert (counters.steps, counters.encoded_elements) == (2, 2 * (2800 + 3000 + 600))
    assert counters.uncompressed_bytes == 2 * 4 * (2800 + 10 + 3000 + 600)
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0


@on_ranks(2, launcher="tensorflow")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    """Whose levels the other gradients' residuals have counted as sent, or will."""
    for codec, feedback in ((Ternary(64), ErrorFeedback(0.1, 0.9)), (ECQ(), WEAK)):
        for index, bad in ((0, np.inf), (2, -np.inf), (3, np.nan)):
            compressor = hvdc.Compressor(
                codec, feedback, threshold=THRESHOLD, exchange="integer_sum"
            )
            exchange = exchange_with(compressor, graph=True)
            for step in range(2):
                exchange(targets(hvd.rank(), step))
            before = kept_by(compressor)
            gradients = targets(hvd.rank(), 2)
            if hvd.rank() == 1:
                gradients[index].reshape(-1)[17] = bad
            got = exchange(gradients)
            assert np.isnan(got[index].reshape(-1)[17])
            assert np.isfinite(got[2 if index != 2 else 0]).all()
            for left, right in zip(kept_by(compressor), before, strict=True):
                np.testing.assert_allclose(left, right, rtol=0, atol=2e-5)
            assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 3)))


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    first = _start()
    exchange = exchange_with(first, graph=True)
    for step in range(2):
        exchange(targets(hvd.rank(), step))
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compressor=first).write(os.path.join(folder, "state"))
        resumed = _start()
        tf.train.Checkpoint(compressor=resumed).read(path)
        again = exchange_with(resumed, graph=True)
        for step in range(2, 4):
            gradients = targets(hvd.rank(), step)
            assert_same(again(gradients), exchange(gradients))
        assert_same(kept_by(resumed), kept_by(first))
        other = hvdc.ECQ(threshold=THRESHOLD)
        with pytest.raises(ValueError, match=r"exchange allgather, got integer_sum.*load_resized"):
            tf.train.Checkpoint(compressor=other).read(path)


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_cannot_be_encoded() -> None:
    """A rank that fails before its norms sends no levels, either; all ranks fail, and go on."""
    compressor = hvdc.ECQ(threshold=0, exchange="integer_sum")

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
    before = kept_by(compressor)
    length, message = (
        (3000, r"gradient.0: expected the levels of all 2 ranks, got those of 1"),
        (2990, r"gradient.0: expected a gradient of 3000 elements as when it was first traced"),
    )[hvd.rank()]
    with pytest.raises(tf.errors.DataLossError, match=message):
        run(None, length)
    for left, right in zip(kept_by(compressor), before, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
    assert np.isfinite(run(None, 3000)).all()


@on_ranks(2, launcher="tensorflow")
def test_what_cannot_be_added() -> None:
    exchange = exchange_with(hvdc.OneBit(exchange="integer_sum"), graph=True)
    with pytest.raises(Exception, match=r"gradient.0: expected a codec of evenly spaced levels"):
        exchange(targets(hvd.rank(), 0))
    compressor = _start()
    signature = [tf.TensorSpec([None, 70])]
    unknown = tf.function(lambda g: compressor.compress(g)[0], input_signature=signature)
    with pytest.raises(Exception, match=r"exchange='integer_sum', got float32 \[None, 70\]"):
        unknown.get_concrete_function()


@on_ranks(2, launcher="tensorflow", alone=True)
def test_another_exchange_and_then_a_rank_that_joins() -> None:
    """The other goes on uncompressed; what it has not sent waits."""
    different = hvdc.ECQ(threshold=THRESHOLD, exchange=("allgather", "integer_sum")[hvd.rank()])
    message = r"(?s)gradient.0: .*through allgather.* on rank 0, .*through integer_sum.* on rank 1"
    with pytest.raises(tf.errors.OpError, match=message):
        exchange_with(different, graph=True)(targets(hvd.rank(), 0))
    compressor, simulation = _start(), _simulation()
    exchange = exchange_with(compressor, graph=True)
    for step in range(2 if hvd.rank() == 0 else 4):
        everywhere = [targets(rank, step) for rank in range(hvd.size())]
        got = exchange(everywhere[hvd.rank()])
        if step < 2:
            assert_same(got, simulation.sum(everywhere, 0.5))
        else:
            for mine, alone in zip(got, everywhere[1], strict=True):
                np.testing.assert_allclose(mine, alone / 2, atol=1e-5)
    hvd.join()
    assert_residuals(compressor, simulation)
