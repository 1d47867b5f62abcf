"""Models and residuals that go on where they were."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from tests.keras.probes import THRESHOLD, compiled, fit, network, same_everywhere, samples
from tests.ranks import on_ranks

SGD = keras.optimizers.SGD


def _same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left.variables, right.variables, strict=True))


@on_ranks(2, launcher="tensorflow")
def test_a_loaded_model_goes_on_exchanging() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    inner = keras.optimizers.Adam(0.01)
    for optimizer in (
        keras.optimizers.AdamW(schedule),
        keras.optimizers.LossScaleOptimizer(inner),
    ):
        stock = type(optimizer)
        model = compiled(hvdc.DistributedOptimizer(optimizer, hvdc.OneBit(threshold=THRESHOLD)))
        assert type(model.optimizer) is not stock and isinstance(model.optimizer, stock)
        fit(model, [hvdc.BroadcastVariables()])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            for _ in range(2):  # What was loaded can be saved again.
                model.save(path)
                loaded = hvdc.load_model(path, hvdc.OneBit(threshold=THRESHOLD))
                assert type(loaded.optimizer) is type(model.optimizer)
                assert _same(loaded.optimizer, model.optimizer)
                model = loaded
            with pytest.raises(hvdc.ExchangeError, match=r"hvd_compress.keras.load_model"):
                fit(keras.models.load_model(path))
            assert _same(keras.models.load_model(path, compile=False), model)
        fit(model)  # On each rank's own samples ...
        assert same_everywhere(model.weights)  # ... and yet alike.


@on_ranks(2, launcher="tensorflow")
def test_a_model_that_was_saved_without_horovod() -> None:
    model = compiled(keras.optimizers.Adam(0.01))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        loaded = hvdc.load_model(path, op=hvd.Sum)
        bare = Path(folder, "bare.keras")
        network().save(bare)
        with pytest.raises(ValueError, match="expected a compiled model"):
            hvdc.load_model(bare)
    fit(loaded, [hvdc.BroadcastVariables()])
    assert same_everywhere([*loaded.weights, *loaded.optimizer.variables])


@on_ranks(2, launcher="tensorflow")
def test_a_checkpoint_of_the_optimizer_has_its_residuals() -> None:
    def made() -> keras.Model:
        compressor = hvdc.OneBit(threshold=THRESHOLD)
        return compiled(hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compressor))

    model = made()
    fit(model, [hvdc.BroadcastVariables()])
    norm = model.optimizer.compression.residual_norm()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"rank-{hvd.rank()}")
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        resumed = made()
        tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).read(path)
        fit(model)
        fit(resumed)
    assert norm > 0
    assert _same(resumed, model)
    assert resumed.optimizer.compression.residual_norm() == pytest.approx(
        model.optimizer.compression.residual_norm()
    )


@on_ranks(2, launcher="tensorflow")
def test_a_finished_training_that_is_started_again() -> None:
    """Its updates were loaded, and are not those of a function that exchanges nothing."""
    inputs, labels = samples(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        path, weights = Path(folder, "model.keras"), Path(folder, "model.weights.h5")
        for start in range(2):
            model = compiled(hvdc.DistributedOptimizer(SGD(0.1)))
            backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
            history = model.fit(inputs, labels, epochs=2, verbose=0, callbacks=[backup])
            assert history.epoch == ([0, 1], [])[start]
        model.save(path)
        model.train_on_batch(inputs, labels)
        model.save_weights(weights)
        loaded = hvdc.load_model(path)
        loaded.load_weights(weights)
        loaded.fit(inputs, labels, epochs=2, initial_epoch=2, verbose=0)
        assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)


@on_ranks(2, launcher="tensorflow")
def test_copies_of_a_model() -> None:
    """They are evaluated and saved as the model is, but train only with an optimizer of their own."""
    batch = samples(hvd.rank())
    for optimizer in (SGD(0.1), keras.optimizers.LossScaleOptimizer(SGD(0.1))):
        model = compiled(hvdc.DistributedOptimizer(optimizer, hvdc.OneBit(threshold=THRESHOLD)))
        fit(model, [hvdc.BroadcastVariables()])
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            clone.save(path)
            loaded = hvdc.load_model(path)
        for copied in (clone, copy.deepcopy(model), keras.models.clone_model(clone)):
            copied.set_weights(model.get_weights())
            assert copied.evaluate(*batch, verbose=0) == model.evaluate(*batch, verbose=0)
            for run_eagerly in (False, True):
                copied.run_eagerly, copied.train_function = run_eagerly, None
                with pytest.raises(hvdc.ExchangeError, match="DistributedOptimizer of its own"):
                    copied.train_on_batch(*batch)
            assert _same(copied, model)
        clone.compile(hvdc.DistributedOptimizer(SGD(0.1)), model.loss)
        for trained in (clone, loaded):
            fit(trained)
            assert same_everywhere(trained.weights)
