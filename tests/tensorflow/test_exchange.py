"""Every codec through a stock DistributedGradientTape, against all ranks simulated by the oracle."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import BF16, ECQ, Codec, ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.tensorflow.collectives import Collectives
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    THRESHOLD,
    Simulation,
    assert_residuals,
    assert_same,
    exchange_with,
    targets,
)

NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit("column"), ErrorFeedback()),
    (OneBit("tensor"), NONE),
    (Int8(), NONE),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _matches_the_simulation(graph: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        compressor = hvdc.Compressor(codec, feedback, threshold=THRESHOLD, seed=7)
        exchange = exchange_with(compressor, graph=graph)
        simulation = Simulation(codec, feedback, size, seed=7)
        for step in range(3):
            gradients = [targets(r, step) for r in range(size)]
            assert_same(exchange(gradients[rank]), simulation.sum(gradients, 1 / size))
        if feedback.enabled:
            assert_residuals(compressor, simulation)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_in_graphs() -> None:
    _matches_the_simulation(graph=True)


@on_ranks(2, launcher="tensorflow")
def test_every_codec_eagerly() -> None:
    _matches_the_simulation(graph=False)


@on_ranks(2, launcher="tensorflow")
def test_any_bytes_come_through_a_sum() -> None:
    collectives = Collectives(hvd.global_process_set, "bytes")
    messages = np.random.default_rng(1).integers(0, 256, (2, 2**20), np.uint8)
    messages[:, :1024], messages[0, 1024:2048] = 255, 0

    @tf.function
    def gather(message: tf.Tensor) -> tf.Tensor:
        return collectives.gather_alike(message, len(message), "all")

    message = tf.constant(messages[hvd.rank()])
    assert np.array_equal(gather(message), messages.reshape(-1))
    kinds = {node.type for node in gather.get_concrete_function(message).graph.get_operations()}
    assert "HorovodAllreduce" in kinds
    assert "HorovodAllgather" not in kinds


@on_ranks(3, launcher="tensorflow")
def test_every_codec_on_three_ranks() -> None:
    _matches_the_simulation(graph=True)


def _sums(scale: float, **options: object) -> None:
    size = hvd.size()
    exchange = exchange_with(hvdc.OneBit(threshold=THRESHOLD), graph=True, **options)
    simulation = Simulation(OneBit(), ErrorFeedback(), size, seed=0)
    for step in range(2):
        gradients = [targets(r, step) for r in range(size)]
        assert_same(exchange(gradients[hvd.rank()]), simulation.sum(gradients, scale))


@on_ranks(2, launcher="tensorflow")
def test_sum_predivide_and_groups() -> None:
    _sums(1.0, op=hvd.Sum)
    _sums(0.5, gradient_predivide_factor=2.0)
    _sums(0.5, groups=2)


@on_ranks(2, launcher="tensorflow")
def test_warm_up() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD, warmup_steps=2)
    exchange = exchange_with(compressor, graph=True)
    simulation = Simulation(OneBit(), ErrorFeedback(), hvd.size(), seed=0)
    for step in range(4):
        gradients = [targets(r, step) for r in range(hvd.size())]
        got = exchange(gradients[hvd.rank()])
        if step < 2:
            means = [np.mean(g, axis=0) for g in zip(*gradients, strict=True)]
            for left, right in zip(got, means, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
        else:
            assert_same(got, simulation.sum(gradients, 0.5))


@on_ranks(2, launcher="tensorflow")
def test_counters() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    counters = compressor.counters
    assert (counters.steps, counters.encoded_elements) == (1, 2800 + 3000 + 600)
    payloads = sum(OneBit().payload_bytes(s) for s in ((40, 70), (3000,), (8, 3, 5, 5)))
    assert counters.message_bytes == payloads + 3 * 4 + 10 * 4
    assert counters.uncompressed_bytes == 4 * (6400 + 10)
    compressor.reset_counters()
    assert compressor.counters.steps == 0
