"""Scripts of all kinds: traces that differ, batches without an exchange, joins, going back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress.keras.elastic import KerasState
from tests.ranks import on_ranks

SGD = keras.optimizers.SGD
Batch = tuple[np.ndarray, np.ndarray]


def _model(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False)])
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


def _batches(count: int) -> list[Batch]:
    """This rank's own batches."""
    rng = np.random.default_rng(hvd.rank())
    return [
        (rng.standard_normal((2, 4)).astype("f4"), rng.standard_normal((2, 3)).astype("f4"))
        for _ in range(count)
    ]


@on_ranks(2, launcher="tensorflow")
def test_gradients_that_are_constants_of_a_trace() -> None:
    """TensorFlow does not keep the result of an exchange whose input it knows."""
    for compression in (None, hvd.Compression.fp16, "int8"):
        for sparse in (False, True):
            variable = keras.Variable(np.zeros((2, 3), np.float32))
            optimizer = hvdc.DistributedOptimizer(SGD(1.0), compression)
            optimizer.build([variable])
            traces = [_trace(optimizer, variable, row, sparse) for row in range(2)]
            for trace in traces:
                trace(tf.ones([1, 3]))
            variable.assign(np.zeros((2, 3), np.float32))
            traces[hvd.rank()](tf.ones([1, 3]) * (10.0, 2.0)[hvd.rank()])
            expected = (-5.0, -1.0) if sparse else (-0.5, -0.5)
            np.testing.assert_allclose(variable.numpy()[:, 0], expected, rtol=0.01)


def _trace(optimizer: Any, variable: Any, row: int, sparse: bool) -> Callable[[tf.Tensor], None]:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        if sparse:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(variable.value, [row]) * x)
            gradient = tape.gradient(loss, variable.value)
        else:
            gradient = tf.constant(float(row), shape=[2, 3])
        optimizer.apply([gradient], [variable])

    return step


class OfItsOwn(keras.Model):
    """A model without a first shape, whose ``train_step`` exchanges by Horovod's tape."""

    def __init__(self, compressor: hvdc.Compressor) -> None:
        super().__init__()
        self.compressor, self.head = compressor, keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.head(inputs)

    def train_step(self, data: Batch) -> dict[str, Any]:
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(inputs) - labels) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor)
        sources = [one.value for one in self.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, sources), self.trainable_variables)
        return {"loss": loss}


@on_ranks(2, launcher="tensorflow")
def test_a_train_step_with_horovods_tape() -> None:
    """Keras traces the step of a model that is not built twice; a variable has one residual in both."""
    compressor = hvdc.OneBit(threshold=0)
    model = OfItsOwn(compressor)
    model.compile(optimizer=SGD(0.1), jit_compile=False)
    inputs, labels = (np.concatenate(part) for part in zip(*_batches(5), strict=True))
    model.fit(inputs, labels, batch_size=4, epochs=2, verbose=0)  # The last batch is smaller.
    assert [slot.label for slot in compressor.slots] == ["gradient.0", "gradient.1"]
    assert [int(slot.exchanges) for slot in compressor.slots] == [6, 6]


@on_ranks(2, launcher="tensorflow")
def test_dropping_a_batch_that_has_exchanged_nothing() -> None:
    """The residuals stay as the batch before left them, whose update was used."""
    for scaled in (True, False):
        inner = SGD(0.1, gradient_accumulation_steps=None if scaled else 2)
        optimizer = keras.optimizers.LossScaleOptimizer(inner) if scaled else inner
        compressor = hvdc.OneBit(threshold=1)
        model = _model(hvdc.DistributedOptimizer(optimizer, compressor))
        *used, last = _batches(5)
        for batch in used:
            model.train_on_batch(*batch)
        before = [kept.numpy() for slot in compressor.slots for kept in slot.kept]
        assert any(one.any() for one in before)
        factor = np.float32(np.inf if scaled and hvd.rank() == 1 else 1)
        exchanges = compressor.counters.steps
        model.train_on_batch(last[0] * factor, last[1])
        assert compressor.counters.steps == exchanges
        compressor.drop_step()
        after = [kept.numpy() for slot in compressor.slots for kept in slot.kept]
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


@on_ranks(2, launcher="tensorflow")
def test_a_joined_rank_leaves_the_loss_scale_as_it_is() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(SGD(0.1))
    model = _model(hvdc.DistributedOptimizer(scaled, hvdc.NoCompression(threshold=1)))
    (batch,) = _batches(1)
    model.train_on_batch(*batch)
    scale = float(scaled.dynamic_scale)
    if hvd.rank() == 0:
        before = model.get_weights()[0]
        for _ in range(3):
            model.train_on_batch(*batch)
        assert np.abs(model.get_weights()[0] - before).max() > 0.001
        assert float(scaled.dynamic_scale) == scale
    hvdc.join()


@on_ranks(2, launcher="tensorflow")
def test_an_optimizer_that_is_distributed_after_a_training() -> None:
    """``fit`` would go on with the function that it has traced, which exchanges nothing."""
    for compression in (None, hvdc.Int8(threshold=1)):
        model = _model(SGD(0.1))
        (batch,) = _batches(1)
        model.fit(*batch, verbose=0)
        hvdc.DistributedOptimizer(model.optimizer, compression)
        with pytest.raises(hvdc.ExchangeError, match=r"got 2 updates without an exchange.*compile"):
            model.fit(*batch, verbose=0)


@on_ranks(2, launcher="tensorflow")
def test_batches_behind_the_last_commit_are_forgotten() -> None:
    """Gradients that are accumulated count once, too."""

    def trained(*, fails: bool) -> np.ndarray:
        model = _model(SGD(0.1, gradient_accumulation_steps=4))
        state = KerasState(model, batch=0)
        state.begin(hvdc.NoCompression())
        batches = _batches(5)
        model.train_on_batch(*batches[4])
        state.commit()
        if fails:
            for batch in batches[:2]:
                model.train_on_batch(*batch)
            state.restore()
            state.reset()
            state.sync()
            state.begin(hvdc.NoCompression())
        for batch in batches[:3]:
            model.train_on_batch(*batch)
        return np.asarray(model.get_weights()[0])

    np.testing.assert_allclose(trained(fails=True), trained(fails=False), atol=1e-6)
