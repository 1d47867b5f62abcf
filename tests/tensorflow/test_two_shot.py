"""The two-shot exchange through a stock tape, against all ranks simulated by the oracle."""

from __future__ import annotations

import math
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import BF16, ECQ, FP16, Codec, ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.exchange.shards import Shards
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    TwoShotSimulation,
    assert_residuals,
    assert_same,
    exchange_with,
    targets,
)

NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8(), NONE),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
    (FP16(), ErrorFeedback()),
]


def _start(**options: Any) -> hvdc.Compressor:
    return hvdc.OneBit(threshold=THRESHOLD, exchange="two_shot", **options)


def _every_codec_matches_the_simulation(graph: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        compressor = hvdc.Compressor(
            codec, feedback, threshold=THRESHOLD, seed=7, exchange="two_shot"
        )
        exchange = exchange_with(compressor, graph=graph)
        simulation = TwoShotSimulation(codec, feedback, size, seed=7)
        for step in range(3):
            gradients = [targets(r, step) for r in range(size)]
            assert_same(exchange(gradients[rank]), simulation.sum(gradients, 1 / size))
        if feedback.enabled:
            assert_residuals(compressor, simulation)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_in_graphs() -> None:
    _every_codec_matches_the_simulation(graph=True)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_eagerly() -> None:
    _every_codec_matches_the_simulation(graph=False)


@on_ranks(3, launcher="tensorflow")
def test_every_codec_on_three_ranks() -> None:
    """Parts of unequal size, and ranks without one."""
    _every_codec_matches_the_simulation(graph=True)


@on_ranks(2, launcher="tensorflow")
def test_sum_predivide_and_groups() -> None:
    for scale, options in (
        (1.0, {"op": hvd.Sum}),
        (0.5, {"gradient_predivide_factor": 2.0}),
        (0.5, {"groups": 2}),
    ):
        exchange = exchange_with(_start(), graph=True, **options)
        simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), hvd.size(), seed=0)
        for step in range(2):
            gradients = [targets(r, step) for r in range(hvd.size())]
            assert_same(exchange(gradients[hvd.rank()]), simulation.sum(gradients, scale))


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

        simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), hvd.size(), seed=0)
        for step in range(3):
            sent = [[tf.cast(g, dtype) for g in targets(rank, step)] for rank in range(hvd.size())]
            everywhere = [[tf.cast(g, tf.float32).numpy() for g in one] for one in sent]
            expected = simulation.sum(everywhere, 0.5)[0]
            got = gradient(sent[hvd.rank()][0])
            assert got.dtype == dtype
            assert np.array_equal(got, tf.cast(expected, dtype))


@on_ranks(2, launcher="tensorflow")
def test_warm_up() -> None:
    exchange = exchange_with(_start(warmup_steps=1), graph=True)
    simulation = TwoShotSimulation(OneBit(), ErrorFeedback(), hvd.size(), seed=0)
    for step in range(3):
        gradients = [targets(r, step) for r in range(hvd.size())]
        got = exchange(gradients[hvd.rank()])
        if step:
            assert_same(got, simulation.sum(gradients, 0.5))
        else:
            for left, right in zip(got, zip(*gradients, strict=True), strict=True):
                np.testing.assert_allclose(left, np.mean(right, axis=0), rtol=1e-6, atol=1e-6)


@on_ranks(3, launcher="tensorflow")
def test_counters_follow_the_formulas() -> None:
    compressor = _start()
    exchange = exchange_with(compressor, graph=True)
    for step in range(2):
        exchange(targets(hvd.rank(), step))
    size, dense = hvd.size(), 4 * 10 + 3 * 4  # The small gradient, and three tokens.
    message, wire = float(dense), 2 * (size - 1) / size * dense
    for index in (0, 2, 3):
        sizes = Shards(math.prod(SHAPES[index]), size, index).payload_bytes(OneBit())
        own = sizes[hvd.rank()]
        message += sum(sizes) + own
        wire += sum(sizes) - own + (size - 1) * own
    counters = compressor.counters
    assert counters.message_bytes == 2 * message
    assert math.isclose(counters.wire_bytes, 2 * wire)
    assert (counters.steps, counters.encoded_elements) == (2, 2 * (2800 + 3000 + 600))
    assert counters.encode_seconds > 0 and counters.decode_seconds > 0


@on_ranks(2, launcher="tensorflow")
def test_what_cannot_take_two_shots() -> None:
    with pytest.raises(ValueError, match=r"tensorflow.*: expected one of .*, got 'mail'"):
        hvdc.OneBit(exchange="mail")
    exchange = exchange_with(_start(group="column"), graph=True)
    with pytest.raises(Exception, match="expected a codec of contiguous groups"):
        exchange(targets(hvd.rank(), 0))
    compressor = _start()
    signature = [tf.TensorSpec([None, 70])]
    unknown = tf.function(lambda g: compressor.compress(g)[0], input_signature=signature)
    with pytest.raises(Exception, match=r"shape tracing knows .*, got float32 \[None, 70\]"):
        unknown.get_concrete_function()
