"""Elastic training under Keras: the documentation's own script, and wrong uses of the state."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress.keras.elastic import CommitState, KerasState
from tests.elastic_jobs import kill_replace_and_add
from tests.ranks import on_ranks


def test_a_rank_is_killed_and_replaced_and_another_host_comes(tmp_path: Path) -> None:
    kill_replace_and_add(tmp_path, "keras_elastic_quickstart.py", "--epochs", "150", begun=5)


def _compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse", jit_compile=False)
    return model


@on_ranks(2, launcher="tensorflow")
def test_wrong_uses() -> None:
    with pytest.raises(ValueError, match="expected a model that is built and compiled, got one"):
        KerasState(keras.Sequential([keras.layers.Dense(3)]))
    model = _compiled()
    with pytest.raises(ValueError, match="expected a state with an epoch, as KerasState"):
        CommitState(KerasState(model))
    state = KerasState(model, epoch=0)
    with pytest.raises(ValueError, match=r"batches: expected an integer in \[1, .*\], got 0"):
        CommitState(state, batches=0)
    hvdc.DistributedOptimizer(model.optimizer)
    with pytest.raises(ValueError, match="expected a model compiled with an optimizer of Keras's"):
        KerasState(model, epoch=0)


@on_ranks(2, launcher="tensorflow")
def test_an_error_in_fit_ends_elastic_training() -> None:
    model = _compiled()
    state = KerasState(model, epoch=0)

    def train(state: KerasState) -> None:
        state.begin(hvdc.Compressor(("onebit", "int8")[hvd.rank()], threshold=1))
        model.fit(keras.random.normal((16, 4)), keras.random.normal((16, 3)), verbose=0)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"(?s)OneBit\(.* 0, .*Int8\(.* rank 1"
    ):
        hvd.elastic.run(train)(state)


@on_ranks(2, launcher="tensorflow")
def test_the_optimizer_goes_on_with_another_compressor() -> None:
    model = _compiled()
    state = KerasState(model, epoch=0)
    for expected in range(2):
        compressor = state.begin(hvdc.OneBit(threshold=1), sparse_as_dense=True)
        assert model.optimizer.compression is compressor
        inputs = keras.random.normal((16, 4))
        model.fit(
            inputs,
            inputs[:, :3],
            epochs=expected + 1,
            initial_epoch=state.epoch,
            batch_size=8,
            verbose=0,
            callbacks=[CommitState(state, batches=1)],
        )
        assert state.epoch == expected + 1
        assert compressor.counters.steps == 2
        assert [int(slot.exchanges) for slot in compressor.slots] == [2 * (expected + 1)] * 2
        state.on_reset()
