"""Single updates with known gradients: their values, dropped ones, sparse ones, and wrong uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as horovod_keras
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.keras.probes import compiled, fit, same_everywhere
from tests.ranks import on_ranks
from tests.tensorflow.probes import (
    SHAPES,
    THRESHOLD,
    Simulation,
    assert_same,
    targets,
)

SGD = keras.optimizers.SGD


def _updates(optimizer: Any) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """A function from gradients to what they were reduced to, where the update takes place."""
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]

    @tf.function(autograph=False)
    def apply(gradients: Sequence[tf.Tensor]) -> None:
        optimizer.apply(gradients, variables)

    def update(gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        for variable in variables:
            variable.assign(np.zeros(variable.shape, np.float32))
        apply([tf.constant(g) for g in gradients])
        return [-v.numpy() for v in variables]

    return update


def _everybodys(step: int) -> list[list[np.ndarray]]:
    return [targets(rank, step) for rank in range(hvd.size())]


@on_ranks(2, launcher="tensorflow")
def test_updates_are_those_of_the_reference() -> None:
    settings: list[tuple[dict[str, Any], float, str]] = [
        ({}, 0.5, "allgather"),
        ({"op": hvd.Sum}, 1.0, "allgather"),
        ({"gradient_predivide_factor": 2.0}, 0.5, "allgather"),
        ({}, 0.5, "two_shot"),
    ]
    for options, scale, exchange in settings:
        compressor = hvdc.OneBit(threshold=THRESHOLD, exchange=exchange)
        update = _updates(hvdc.DistributedOptimizer(SGD(1.0), compressor, **options))
        simulation = Simulation(exchange, OneBit(), ErrorFeedback(), hvd.size())
        for step in range(3):
            everybodys = _everybodys(step)
            assert_same(update(everybodys[hvd.rank()]), simulation.sum(everybodys, scale))


def _update_of(optimizer: Any, heads: Sequence[Any], turn: int, subset: bool) -> Any:
    def update(gradient: tf.Tensor) -> None:
        if subset:
            optimizer.apply([gradient], [heads[turn]])
        else:
            optimizer.apply([gradient, None] if turn == 0 else [None, gradient], heads)

    return update


@on_ranks(2, launcher="tensorflow")
def test_two_heads_take_turns() -> None:
    """Eagerly and traced, by None for the other head's gradient and by a subset of the variables."""
    for graph, subset in ((True, True), (True, False), (False, True), (False, False)):
        compressor = hvdc.OneBit(threshold=0)
        optimizer = hvdc.DistributedOptimizer(SGD(1.0), compressor)
        heads = [keras.Variable(np.zeros((40, 70), np.float32), name=name) for name in "ab"]
        optimizer.build(heads)
        updates = [_update_of(optimizer, heads, turn, subset) for turn in range(2)]
        if graph:
            updates = [tf.function(update, autograph=False) for update in updates]
        wanted = [np.zeros((40, 70), np.float32) for _ in heads]
        for step in range(6):
            turn = step % 2
            numbers = np.random.default_rng([step, hvd.rank()]).standard_normal((40, 70))
            gradient = (numbers * (100, 1)[turn]).astype(np.float32)
            wanted[turn] += gradient
            updates[turn](tf.constant(gradient))
        assert [slot.label for slot in compressor.slots] == [head.path for head in heads]
        for slot, head, own in zip(compressor.slots, heads, wanted, strict=True):
            left = hvd.allreduce(slot.residual, name=f"left.{slot.index}").numpy()
            mean = hvd.allreduce(tf.constant(own), name=f"own.{slot.index}").numpy()
            sent = left.reshape(mean.shape) - head.numpy()
            np.testing.assert_allclose(sent, mean, atol=1e-5 * np.abs(mean).max())


@on_ranks(2, launcher="tensorflow")
def test_accumulated_updates_are_those_of_the_reference() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    optimizer = SGD(1.0, gradient_accumulation_steps=2)
    update = _updates(hvdc.DistributedOptimizer(optimizer, compressor))
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), hvd.size())
    for step in range(0, 6, 2):
        first, second = _everybodys(step), _everybodys(step + 1)
        assert not any(np.any(v) for v in update(first[hvd.rank()]))
        means = [
            [(b + a) / 2 for a, b in zip(*pair, strict=True)]
            for pair in zip(first, second, strict=True)
        ]
        assert_same(update(second[hvd.rank()]), simulation.sum(means, 0.5))
    assert compressor.counters.steps == 3


@on_ranks(2, launcher="tensorflow")
def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    for steps in (None, 2):
        compressor = hvdc.OneBit(threshold=THRESHOLD)
        inner = SGD(1.0, gradient_accumulation_steps=steps)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
        update = _updates(hvdc.DistributedOptimizer(optimizer, compressor))
        for step in range(2):
            update([1024 * g for g in targets(hvd.rank(), step)])
        residuals = [slot.residual.numpy() for slot in compressor.slots]
        overflow = targets(hvd.rank(), 2)
        if hvd.rank() == 1:
            overflow[1][3] = np.inf  # In a gradient that is not even compressed.
        assert not any(np.any(v) for v in update(overflow))
        assert float(optimizer.dynamic_scale) == 512
        for slot, before in zip(compressor.slots, residuals, strict=True):
            assert np.array_equal(slot.residual, before)
        expected = None if steps else np.mean([t[1] for t in _everybodys(3)], axis=0)
        got = update([512 * g for g in targets(hvd.rank(), 3)])
        if expected is not None:
            np.testing.assert_allclose(got[1], expected, rtol=1e-5, atol=1e-6)


@on_ranks(2, launcher="tensorflow")
def test_sparse_gradients() -> None:
    rank = hvd.rank()
    for dense in (False, True):
        optimizer = SGD(1.0)
        hvdc.DistributedOptimizer(optimizer, hvdc.NoCompression(), sparse_as_dense=dense)
        variable = keras.Variable(np.zeros((50, 30), np.float32))
        for rows in ([rank, 7, 7], [3, rank]):  # Another number of them does not trace again.
            values = np.full((len(rows), 30), 1.0 + rank, np.float32)
            shape = tf.constant([50, 30])
            sparse = tf.IndexedSlices(tf.constant(values), tf.constant(rows), shape)
            variable.assign(np.zeros((50, 30), np.float32))
            optimizer.apply([sparse], [variable])
            got = -variable.numpy()[:, 0]
            expected = np.zeros(50)
            for other in range(2):
                for row in [other if r == rank and r < 2 else r for r in rows]:
                    expected[row] += (1 + other) / 2
            assert np.array_equal(got, expected), (got, expected)


def _sparse(value: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.fill([1, 30], value), tf.constant([1]), tf.constant([50, 30]))


@on_ranks(2, launcher="tensorflow")
def test_ranks_that_exchange_different_variables() -> None:
    """Variables of the same shape: in the first update, and when all ranks have exchanged both."""
    for gradient in (tf.ones([50, 30]), _sparse(1.0)):
        for compression in (None, hvd.Compression.fp16, "onebit"):
            for updates in (0, 2):
                heads = [keras.Variable(np.zeros((50, 30), np.float32)) for _ in range(2)]
                optimizer = hvdc.DistributedOptimizer(SGD(1.0), compression)
                optimizer.build(heads)
                for _ in range(updates):
                    optimizer.apply([gradient, gradient], heads)
                gradients = [gradient, None] if hvd.rank() == 0 else [None, gradient]
                with pytest.raises(Exception, match=r"on this rank and others|rank 0, .*on rank 1"):
                    optimizer.apply(gradients, heads)


@on_ranks(2, launcher="tensorflow")
def test_sparse_gradients_with_another_op() -> None:
    op = hvd.Sum if hvd.rank() == 0 else hvd.Average
    for compression in (None, hvdc.Int8()):
        optimizer = hvdc.DistributedOptimizer(SGD(1.0), compression, op=op)
        variable = keras.Variable(np.zeros((50, 30), np.float32))
        told = rf"got .*op={('Sum', 'Average')[hvd.rank()]} on this|op: op=Sum on rank 0, op=Av"
        with pytest.raises(Exception, match=told):
            optimizer.apply([_sparse(1.0)], [variable])


@on_ranks(2, launcher="tensorflow")
def test_a_gradient_that_is_sparse_on_one_rank() -> None:
    """No rank waits for the rows of another one: what is sent without the compressor follows its check."""
    ones, first = tf.ones([50, 30]), hvd.rank() == 0
    for mine in ([ones, _sparse(1.0)], [None, _sparse(1.0)]):
        for other in ([ones, ones], [ones, None]):
            variables = [keras.Variable(np.zeros((50, 30), np.float32)) for _ in range(2)]
            optimizer = hvdc.DistributedOptimizer(SGD(1.0), "onebit")
            with pytest.raises(
                Exception, match=r"IndexedSlices of variable 1 .* on rank 0, absent"
            ):
                optimizer.apply(mine if first else other, variables)
            hvd.allreduce(tf.zeros(1), name=f"not one rank waits {len(optimizer.variables)}")
            assert not any(np.any(variable) for variable in variables)


@on_ranks(2, launcher="tensorflow")
def test_variables_of_tensorflow() -> None:
    for compression in (None, hvdc.NoCompression(threshold=1), hvdc.Auto()):
        variables = [tf.Variable(tf.zeros([50, 30])) for _ in range(2)]
        optimizer = hvdc.DistributedOptimizer(SGD(1.0), compression)
        optimizer.apply([tf.fill([50, 30], i + hvd.rank()) for i in (1.0, 2.0)], variables)
        assert [float(v[0, 0]) for v in variables] == [-1.5, -2.5]


@on_ranks(2, launcher="tensorflow")
def test_missing_gradients() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    optimizer = hvdc.DistributedOptimizer(SGD(1.0), compressor)
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    gradients = targets(hvd.rank(), 0)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, *map(tf.constant, gradients[1:])], variables)
    assert not np.any(variables[0].numpy())
    assert np.any(variables[2].numpy()) and same_everywhere(variables)


class Outside(SGD):
    """Updates without ``_clip_gradients``, so that nothing would be exchanged."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._backend_update_step(grads, trainable_variables, self.learning_rate)


@on_ranks(2, launcher="tensorflow")
def test_wrong_uses() -> None:
    make = hvdc.DistributedOptimizer
    with pytest.raises(hvdc.ExchangeError, match="jit_compile=False"):
        fit(compiled(make(SGD(), hvdc.OneBit()), jit_compile=True))
    with pytest.raises(hvdc.ExchangeError, match=r"DistributedOptimizer\(LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(make(SGD()))
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(make(SGD())))
    with pytest.raises(hvdc.ExchangeError, match=r"DistributedOptimizer\(LossScaleOptimizer"):
        fit(compiled(keras.optimizers.LossScaleOptimizer(several)))
    with pytest.raises(hvdc.ExchangeError, match="Outside to call _clip_gradients once"):
        _updates(make(Outside()))(targets(0, 0))
    with pytest.raises(TypeError, match="not distributed yet"):
        make(make(SGD()))
    with pytest.raises(TypeError, match="make one of DistributedOptimizers"):
        make(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD())))
    with pytest.raises(TypeError, match=r"got builtins\.str"):
        make("adam")
    with pytest.raises(ValueError, match="onebitt"):
        make(SGD(), "onebitt")
    with pytest.raises(TypeError, match="expected a codec or its name"):
        make(SGD(), object())
    with pytest.raises(ValueError, match=r"hvd.Average or hvd.Sum"):
        make(SGD(), op=hvd.Min)
    with pytest.raises(ValueError, match=r"op=hvd.Average with gradient_predivide_factor"):
        make(SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)


@on_ranks(2, launcher="tensorflow")
def test_horovods_own_optimizer_refuses_our_compressors() -> None:
    compressor = hvdc.OneBit()
    with pytest.raises(hvdc.ExchangeError, match=r"hvd_compress.keras.DistributedOptimizer"):
        horovod_keras.DistributedOptimizer(SGD(), compression=compressor)
    with pytest.raises(hvdc.ExchangeError, match="TF_USE_LEGACY_KERAS=1"):
        hvd.DistributedOptimizer(SGD(), compression=compressor)
    horovod_keras.DistributedOptimizer(SGD())
    assert {compressor: 1}[compressor] == len({compressor, compressor})
