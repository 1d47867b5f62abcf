"""The recipes of the page on Keras, run on two ranks."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.keras as hvdc
from tests.keras.probes import BATCH, THRESHOLD, compiled, fit, same_everywhere, samples
from tests.ranks import on_ranks

PATH = Path(__file__).parent.parent.parent / "docs" / "examples" / "keras_recipes.py"
_spec = importlib.util.spec_from_file_location("keras_recipes", PATH)
assert _spec is not None and _spec.loader is not None
recipes: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(recipes)


def _model(rate: float = 0.01) -> keras.Model:
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    return compiled(hvdc.DistributedOptimizer(optimizer, compressor))


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*model.weights, *model.optimizer.variables)]


@contextmanager
def _folder() -> Iterator[str]:
    """The same one on every rank."""
    path = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, name="folder")
    try:
        yield path
    finally:
        hvd.allreduce(tf.zeros(1), name="the folder is not needed any more")
        if hvd.rank() == 0:
            shutil.rmtree(path)


class _Ends(keras.callbacks.Callback):
    """The job is killed behind an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            raise KeyboardInterrupt


@on_ranks(2, launcher="tensorflow")
def test_a_restart_goes_on_bit_for_bit_from_backups() -> None:
    options = {"epochs": 4, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    whole = _model()
    with _folder() as folder:
        recipes.fit_with_backups(whole, *samples(hvd.rank()), folder=folder, **options)
    with _folder() as folder:
        for end in (1, 3):
            with pytest.raises(KeyboardInterrupt):
                recipes.fit_with_backups(
                    _model(), *samples(hvd.rank()), folder=folder, callbacks=[_Ends(end)], **options
                )
        resumed = _model()
        history = recipes.fit_with_backups(
            resumed,
            *samples(hvd.rank()),
            folder=folder,
            callbacks=[hvdc.CompareWeights()],
            **options,
        )
    assert history.epoch == [3]
    assert all(map(np.array_equal, _weights(resumed), _weights(whole)))


@on_ranks(2, launcher="tensorflow")
def test_each_rank_saves_the_same_best_model_in_its_own_directory() -> None:
    model = _model()
    with _folder() as folder:
        fit(model, [hvdc.BroadcastVariables(), *recipes.best_model(folder)], epochs=3)
        loaded = hvdc.load_model(f"{folder}/rank-{hvd.rank()}/best.keras")
        assert same_everywhere(loaded.weights)
        assert len(list(Path(folder).glob("rank-*/best.keras"))) == 2


@on_ranks(2, launcher="tensorflow")
def test_uneven_numbers_of_batches() -> None:
    inputs, labels = samples(hvd.rank())
    count = len(inputs) - 2 * BATCH * hvd.rank()
    data = tf.data.Dataset.from_tensor_slices((inputs[:count], labels[:count])).batch(BATCH)
    even = recipes.as_many_batches_everywhere(data)
    assert len(data) != len(even) or hvd.rank() == 1
    model = _model()
    model.fit(even, epochs=2, verbose=0, callbacks=[hvdc.BroadcastVariables()])
    assert model.optimizer.compression.counters.steps == 2 * len(even)
    assert same_everywhere(model.weights)


@on_ranks(2, launcher="tensorflow")
def test_a_step_that_goes_back_is_as_if_it_had_not_been() -> None:
    inputs, labels = samples(hvd.rank())
    batches = [(inputs[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, len(inputs), BATCH)]
    models = []
    for with_a_bad_one in (True, False):
        model = _model()
        for variable, value in zip(
            model.weights,
            hvd.broadcast_object([v.numpy() for v in model.weights], name="first"),
            strict=True,
        ):
            variable.assign(value)
        assert recipes.train_on_batch_or_go_back(model, *batches[0], limit=10.0)
        if with_a_bad_one:
            bad = 1e4 * batches[1][0]
            assert not recipes.train_on_batch_or_go_back(model, bad, batches[1][1], limit=10.0)
        for batch in batches[2:]:
            assert recipes.train_on_batch_or_go_back(model, *batch, limit=10.0)
        models.append(_weights(model))
        norm = model.optimizer.compression.residual_norm()
        assert norm > 0
        models[-1].append(np.asarray(norm))
    assert all(map(np.array_equal, *models))
