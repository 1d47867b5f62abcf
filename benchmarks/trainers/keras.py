"""Training with ``model.fit`` of Keras 3, on TensorFlow, and :mod:`hvd_compress.keras`.

Model, optimizer and everything around the step are those of :mod:`benchmarks.trainers.tensorflow`. Keras
reads batches ahead in a thread of its own, so that a step's time has little of their making in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

import hvd_compress.keras as hvdc
from benchmarks.compressions import Compression
from benchmarks.loop import Batch
from benchmarks.settings import Settings
from benchmarks.trainers import tensorflow


class KerasSession(tensorflow.TensorFlowSession):
    """Implements :class:`benchmarks.loop.Session`."""

    def __init__(
        self, model: keras.Model, settings: Settings, compression: Compression, seed: int
    ) -> None:
        super().__init__(model, settings, compression, seed)
        if self._compressor is not None:
            hvdc.DistributedOptimizer(self._optimizer, compression=self._compressor)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Neither Horovod nor the codecs have operations for XLA, which Keras would turn on.
        model.compile(self._optimizer, loss, jit_compile=False)

    def _label(self, position: int, variable: keras.Variable) -> str:
        return variable.path

    def train(
        self, batches: Iterable[Batch], rates: Sequence[float], ended: Callable[[float], None]
    ) -> None:
        self._model.fit(
            batches,
            steps_per_epoch=len(rates),
            callbacks=[_Steps(rates, ended)],
            shuffle=False,
            verbose=0,
        )


class _Steps(keras.callbacks.Callback):
    """Sets each step's learning rate, and passes its loss on."""

    def __init__(self, rates: Sequence[float], ended: Callable[[float], None]) -> None:
        super().__init__()
        self._rates = rates
        self._ended = ended

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = self._rates[batch]
        self.model.reset_metrics()  # Keras reports means since the last reset.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ended(logs["loss"])


class KerasTrainer(tensorflow.TensorFlowTrainer):
    """Implements :class:`benchmarks.loop.Trainer`."""

    _session = KerasSession


def start(threads: int) -> KerasTrainer:
    """Initialises Horovod and TensorFlow in this process."""
    tensorflow.set_up(threads)
    return KerasTrainer()
