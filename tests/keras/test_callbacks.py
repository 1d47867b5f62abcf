"""Callbacks that keep the ranks' metrics and learning rates alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from tests.keras.probes import BATCH, CLASSES, SAMPLES, THRESHOLD, compiled, fit, same_everywhere
from tests.ranks import on_ranks


class _Recorder(keras.callbacks.Callback):
    """Learning rates by batch, of the model's optimizer or of its parts, and logs by epoch."""

    def __init__(self, parts: Sequence[Any] = ()) -> None:
        super().__init__()
        self.parts = parts
        self.rates: list[Any] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rates = [float(part.learning_rate) for part in self.parts or [self.model.optimizer]]
        self.rates.append(rates if self.parts else rates[0])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def _model(**options: Any) -> tuple[keras.Model, Any]:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    return compiled(hvdc.DistributedOptimizer(optimizer, compressor), **options), optimizer


@on_ranks(2, launcher="tensorflow")
def test_metrics_are_the_ranks_average_for_callbacks_that_follow() -> None:
    model, optimizer = _model(metrics=["accuracy"])
    before, after = _Recorder(), _Recorder()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=3, min_delta=10.0)
    callbacks = [hvdc.BroadcastVariables(), before, hvdc.MetricAverage(), after, plateau, stop]
    losses = fit(model, [*callbacks, hvdc.CompareWeights()], epochs=6)
    assert len(losses) == 4  # EarlyStopping stopped both.
    everyones = hvd.allgather_object(before.logs, name="before")
    for epoch, averages in enumerate(after.logs):
        for name in ("loss", "accuracy"):
            own = [logs[epoch][name] for logs in everyones]
            assert averages[name] == pytest.approx(np.mean(own))
            assert name == "accuracy" or own[0] != own[1]
    assert losses == [logs["loss"] for logs in after.logs]
    assert hvd.allgather_object(after.logs, name="after") == [after.logs] * 2
    assert float(optimizer.learning_rate) < 0.1


@on_ranks(2, launcher="tensorflow")
def test_metrics_of_the_compressor() -> None:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    model = compiled(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor))
    after = _Recorder()
    fit(model, [hvdc.BroadcastVariables(), hvdc.CompressionMetrics(compressor), after], epochs=2)
    assert [logs["compression/residual_norm"] > 0 for logs in after.logs] == [True, True]
    assert after.logs[-1]["compression/ratio"] == compressor.counters.ratio < 0.2
    assert after.logs[-1]["compression/bytes_per_step"] == compressor.counters.per_step.wire_bytes


@on_ranks(2, launcher="tensorflow")
def test_accumulated_gradients_that_are_not_exchanged() -> None:
    """The weights of two ranks are the same until the second batch."""
    model = compiled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    compare = hvdc.CompareWeights(steps=1)
    with pytest.raises(hvdc.ExchangeError, match=r"expected the same weights .* behind batch 2, "):
        fit(model, [hvdc.BroadcastVariables(), compare], epochs=1)


@on_ranks(2, launcher="tensorflow")
def test_decisions_by_one_ranks_metrics_are_noticed() -> None:
    class Decides(keras.callbacks.Callback):
        def __init__(self, stop: bool) -> None:
            super().__init__()
            self.stop = stop

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 1 and self.stop:
                self.model.stop_training = True
            elif hvd.rank() == 1:
                self.model.optimizer.learning_rate = 1e-3

    for stop, what in ((False, "learning rate"), (True, "decision to stop")):
        model, _ = _model()
        with pytest.raises(hvdc.ExchangeError, match=f"same {what} .* epoch 1, .*MetricAverage"):
            fit(model, [hvdc.BroadcastVariables(), Decides(stop), hvdc.CompareWeights()])


@on_ranks(2, launcher="tensorflow")
def test_other_metrics_on_one_rank_are_an_error_on_all() -> None:
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 0:
                logs["val_loss"] = 1.0

    model, _ = _model()
    with pytest.raises(hvdc.ExchangeError, match=r"\['loss', 'val_loss'\], \['loss'\]"):
        fit(model, [Adds(), hvdc.MetricAverage()])


@on_ranks(2, launcher="tensorflow")
def test_metrics_that_are_arrays() -> None:
    logs: dict[str, Any] = {"loss": 1.0 + hvd.rank(), "f1": tf.range(2.0) + hvd.rank(), "same": 0.1}
    hvdc.MetricAverage().on_epoch_end(0, logs)
    np.testing.assert_allclose(logs["f1"], [0.5, 1.5])
    assert (logs["loss"], logs["same"]) == (1.5, 0.1)
    logs["f1"] = tf.zeros([2 + hvd.rank()])
    with pytest.raises(hvdc.ExchangeError, match=r"\['f1\(2,\)', .*\], \['f1\(3,\)', "):
        hvdc.MetricAverage().on_epoch_end(0, logs)


@on_ranks(2, launcher="tensorflow")
def test_a_warm_up_and_a_schedule_of_keras() -> None:
    batches = SAMPLES // BATCH
    schedule = keras.optimizers.schedules.CosineDecay(
        0.1, 2 * batches, warmup_target=0.2, warmup_steps=batches
    )
    optimizer = hvdc.DistributedOptimizer(
        keras.optimizers.SGD(schedule), hvdc.OneBit(threshold=THRESHOLD)
    )
    model, recorder = compiled(optimizer), _Recorder()
    fit(model, [hvdc.BroadcastVariables(), recorder, hvdc.CompareWeights()], epochs=3)
    # A rate is that of the next batch.
    expected = [float(schedule(batch + 1)) for batch in range(3 * batches)]
    assert recorder.rates == pytest.approx(expected)
    assert max(recorder.rates) == pytest.approx(0.2) and recorder.rates[-1] == 0
    assert same_everywhere([*model.weights, *optimizer.variables])


class Built(keras.Model):
    """A model whose layers are built by the first batch, though it says that it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(32), keras.layers.Dense(CLASSES)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.head(self.hidden(inputs))


class Empty(keras.Model):
    """A model without layers, which the first batch makes, though it says that it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[Any] = []
        self.built = True

    def call(self, inputs: Any) -> Any:
        if not self.heads:
            self.heads.append(keras.layers.Dense(CLASSES))
        return self.heads[0](inputs)


@on_ranks(2, launcher="tensorflow")
def test_weights_that_do_not_exist_yet_are_broadcast_when_they_do() -> None:
    keras.utils.set_random_seed(1 + hvd.rank())
    for kind in (Built, Empty):
        model = kind()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(hvdc.DistributedOptimizer(optimizer, hvdc.OneBit(threshold=THRESHOLD)), loss)
        fit(model, [hvdc.BroadcastVariables(), hvdc.CompareWeights()], epochs=1)
        assert same_everywhere(model.trainable_variables)
