"""The hierarchical exchange through a stock tape, against all ranks simulated by the oracle."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import ECQ, Codec, ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.exchange.shards import Shards
from hvd_compress.tensorflow.exchanges import hierarchical
from tests.ranks import on_ranks
from tests.tensorflow.auto_probes import every_change_of_way_keeps_every_gradient
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    HierarchicalSimulation,
    assert_residuals,
    assert_same,
    exchange_with,
    kept_by,
    targets,
)

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8(), NONE),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
]


def _start(**options: Any) -> hvdc.Compressor:
    return hvdc.OneBit(**{"threshold": THRESHOLD, "exchange": "hierarchical", **options})


def _simulation(seed: int = 0) -> HierarchicalSimulation:
    return HierarchicalSimulation(OneBit(), ErrorFeedback(), hvd.size(), hvd.local_size(), seed)


def _matches_the_simulation(
    codec: Codec, feedback: ErrorFeedback, *, scale: float = 0.0, graph: bool = True, **tape: Any
) -> None:
    rank, size = hvd.rank(), hvd.size()
    compressor = hvdc.Compressor(
        codec, feedback, threshold=THRESHOLD, seed=7, exchange="hierarchical"
    )
    exchange = exchange_with(compressor, graph=graph, **tape)
    simulation = HierarchicalSimulation(codec, feedback, size, hvd.local_size(), seed=7)
    for step in range(3):
        gradients = [targets(r, step) for r in range(size)]
        assert_same(exchange(gradients[rank]), simulation.sum(gradients, scale or 1 / size))
    if feedback.enabled:
        assert_residuals(compressor, simulation)


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_every_codec_on_two_hosts_of_two_ranks() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (2, 2)
    for codec, feedback in ROWS:
        _matches_the_simulation(codec, feedback)
    _matches_the_simulation(OneBit(), ErrorFeedback(), graph=False)
    _matches_the_simulation(OneBit(), ErrorFeedback(), scale=1.0, op=hvd.Sum)
    _matches_the_simulation(OneBit(), ErrorFeedback(), gradient_predivide_factor=2.0)


@on_ranks(2, launcher="tensorflow on two hosts")
def test_two_hosts_of_one_rank_need_no_process_sets() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (1, 2)
    for codec, feedback in ROWS:
        _matches_the_simulation(codec, feedback)


@on_ranks(2, launcher="tensorflow")
def test_one_host_needs_no_process_sets() -> None:
    assert (hvd.local_size(), hvd.cross_size()) == (2, 1)
    for codec, feedback in ROWS:
        _matches_the_simulation(codec, feedback)


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
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
        for step in range(2):
            sent = [[tf.cast(g, dtype) for g in targets(rank, step)] for rank in range(hvd.size())]
            everywhere = [[tf.cast(g, tf.float32).numpy() for g in one] for one in sent]
            expected = simulation.sum(everywhere, 1 / 4)[0]
            got = gradient(sent[hvd.rank()][0])
            assert got.dtype == dtype
            assert np.array_equal(got, tf.cast(expected, dtype))


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_counters_tell_what_leaves_the_host() -> None:
    compressor = _start()
    exchange = exchange_with(compressor, graph=True)
    exchange(targets(hvd.rank(), 0))
    between, within, message, owned = 0, 0, 0, 0
    for index in (0, 2, 3):
        shards = Shards(math.prod(SHAPES[index]), 2, index)
        mine = shards.length(hvd.local_rank())
        own = shards.payload_bytes(OneBit())[hvd.local_rank()]
        between += own
        within += 4 * (shards.count - mine) + 2 * own
        message += 4 * shards.count + 2 * own + own
        owned += mine
    dense = 4 * 10 + 3 * 4  # The small gradient, and three tokens.
    counters = compressor.counters
    assert counters.local_bytes == within
    assert math.isclose(counters.wire_bytes, between + within + 2 * 3 / 4 * dense)
    assert counters.message_bytes == message + dense
    assert counters.encoded_elements == owned


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for index, bad in ((0, np.inf), (3, np.nan)):
        compressor = _start()
        exchange = exchange_with(compressor, graph=True)
        exchange(targets(hvd.rank(), 0))
        before = kept_by(compressor)
        gradients = targets(hvd.rank(), 1)
        if hvd.rank() == 1:
            gradients[index].reshape(-1)[17] = bad
        got = exchange(gradients)
        assert not np.isfinite(got[index]).all()
        assert np.isfinite(got[2]).all()
        for left, right in zip(kept_by(compressor), before, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)
        assert all(np.isfinite(g).all() for g in exchange(targets(hvd.rank(), 2)))


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
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


def _unsent(compressor: hvdc.Compressor) -> np.ndarray:
    """What all ranks together would still add to their average of gradient 0."""
    total = np.zeros(math.prod(SHAPES[0]))
    slot = compressor.slots[0]
    residual, owned = slot.residual.numpy(), slot.owned.numpy()
    if len(residual):
        total += residual / hvd.size()
    if len(owned):
        owners = compressor.owner.owners
        part = slice(*Shards(total.size, owners, 0).of(hvd.rank() % owners))
        total[part] += owned * owners / hvd.size()
    return hvd.allreduce(total, op=hvd.Sum, name=f"unsent.{compressor.owner.serialize()}").numpy()


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_a_change_of_exchange_loses_no_mass() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    paths: list[str] = []
    total, sent = np.zeros(SHAPES[0]), np.zeros(SHAPES[0])
    for number, chosen in enumerate(("two_shot", "hierarchical", "allgather", "hierarchical")):
        compressor = _start(exchange=chosen)
        if paths:
            compressor.load_resized(paths)
        exchange = exchange_with(compressor, graph=True)
        for step in range(2 * number, 2 * number + 2):
            gradients = [targets(r, step) for r in range(4)]
            sent += exchange(gradients[hvd.rank()])[0]
            total += np.mean([one[0] for one in gradients], axis=0)
        unsent = _unsent(compressor).reshape(SHAPES[0])
        assert np.abs(unsent).max() > 0.1
        np.testing.assert_allclose(sent + unsent, total, atol=1e-4)
        path = os.path.join(folder, f"{chosen}-{number}-{hvd.rank()}")
        tf.train.Checkpoint(compressor=compressor).write(path)
        paths = hvd.allgather_object(path, name=f"written.{number}")


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_it_is_among_the_ways_that_a_planner_may_choose() -> None:
    every_change_of_way_keeps_every_gradient(ways=7)


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_a_gradient_that_cannot_be_encoded() -> None:
    """Its owners get nothing of it, and send zeros; all ranks fail, and go on."""
    compressor = _start(threshold=0)

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
    length, message = {
        0: (
            3000,
            r"as its owner: gradient.0: expected 8192 bytes from the 2 ranks of the host, got",
        ),
        1: (2990, r"gradient.0: expected a gradient of 3000 elements as when it was first traced"),
    }.get(hvd.rank(), (3000, r"gradient.0: expected rank [01]'s average, got none"))
    with pytest.raises(tf.errors.DataLossError, match=message):
        run(None, length)
    assert np.array_equal(run(None, 3000), tf.ones([3000]))


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC)
def test_what_cannot_be_hierarchical() -> None:
    pair = hvd.add_process_set([0, 3])  # Hosts and places have sets of their own.
    with pytest.raises(ValueError, match="expected None for exchange='hierarchical', got a set of"):
        _start(process_set=pair)
    exchange = exchange_with(_start(group="column"), graph=True)
    with pytest.raises(Exception, match="contiguous groups for exchange='hierarchical'"):
        exchange(targets(hvd.rank(), 0))


@on_ranks(4, launcher="tensorflow on two hosts", environment=DYNAMIC, alone=True)
def test_a_rank_that_joins() -> None:
    compressor, simulation = _start(), _simulation()
    exchange = exchange_with(compressor, graph=True)
    for step in range(2 if hvd.rank() == 2 else 4):
        everywhere = [targets(rank, step) for rank in range(4)]
        got = exchange(everywhere[hvd.rank()])
        if step < 2:
            assert_same(got, simulation.sum(everywhere, 1 / 4))
        else:
            for index, mine in enumerate(got):
                mean = sum(everywhere[rank][index] for rank in (0, 1, 3)) / 4
                np.testing.assert_allclose(mine, mean, atol=1e-5)
    hvd.join()
    assert_residuals(compressor, simulation)


@on_ranks(3, launcher="tensorflow on two hosts", environment=DYNAMIC, alone=True)
def test_hosts_of_unequal_size() -> None:
    message = r"hosts: .*place 0 of 2 on host 0 on rank 0, .* place 0 of 1 on host 1 on rank 2"
    with pytest.raises(hvdc.ExchangeError, match=message):
        _start()


@on_ranks(4, launcher="tensorflow on two hosts", alone=True)
def test_no_process_sets_and_a_rank_with_another_exchange() -> None:
    with pytest.raises(hvdc.ExchangeError, match="takes process sets, got: Set HOROVOD_DYNAMIC"):
        _start()
    if hvd.rank() == 3:
        _start(exchange="two_shot")
    else:
        with (
            mock.patch.object(hierarchical, "_PATIENCE", 2.0),
            pytest.raises(hvdc.ExchangeError, match="expected all 4 ranks to make a compressor"),
        ):
            _start()
    hvd.allreduce(tf.zeros(1), name="met")  # A rank that leaves early would take Horovod with it.
