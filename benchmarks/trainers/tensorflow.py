"""Training with a ``tf.function`` and a stock Horovod's gradient tape.

The optimizer is Keras's, whose momentum holds the learning rates under which gradients came in, unlike
torch's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, STOCK, Compression
from benchmarks.loop import TOP, Batch, Score
from benchmarks.models.tensorflow import build, parameter_name
from benchmarks.settings import ADAM, ADAMW, RMSPROP, RMSPROP_DECAY, Settings
from hvd_compress.ranks.counters import Counters


class TensorFlowSession:
    """Implements :class:`benchmarks.loop.Session`."""

    def __init__(
        self, model: keras.Model, settings: Settings, compression: Compression, seed: int
    ) -> None:
        self._model = model
        hvd.broadcast_variables([weight.value for weight in model.weights], root_rank=0)
        self._parameters = [parameter.value for parameter in model.trainable_variables]
        self._compressor: hvdc.Compressor | None = None
        self._local = compression.name == LOCAL
        if compression.name not in (LOCAL, STOCK):
            options = {"seed": seed, **compression.options}
            if compression.name == "auto":
                options["variables"] = self._parameters
            if "exclude" in options:
                options["exclude"] = self._gradients_of(options["exclude"])
            self._compressor = compressions.make(hvdc, compression.name, **options)
        self._optimizer = _optimizer(settings)
        self._optimizer.build(model.trainable_variables)
        self._step = tf.function(self._train_on)

    @property
    def counters(self) -> Counters:
        """See :class:`benchmarks.loop.Session`."""
        return self._compressor.counters if self._compressor else Counters()

    def train(
        self, batches: Iterable[Batch], rates: Sequence[float], ended: Callable[[float], None]
    ) -> None:
        for (inputs, labels), lr in zip(batches, rates, strict=True):
            self._optimizer.learning_rate = lr
            ended(float(self._step(tf.constant(inputs), tf.constant(labels))))

    def finish(self) -> None:
        """Does nothing: ranks exchange in every step."""

    def evaluate(self, inputs: np.ndarray, labels: np.ndarray) -> Score:
        logits = self._model(tf.constant(inputs), training=False)
        loss = self._cross_entropy(logits, tf.constant(labels))
        found = logits.numpy()
        right = int((found.argmax(-1) == labels).sum())
        own = np.take_along_axis(found, np.asarray(labels, np.int64)[..., None], -1)
        near = int(((found > own).sum(-1) < TOP).sum())
        return Score(right, near, float(loss) * labels.size / math.log(2))

    def residual_norm(self) -> float:
        return self._compressor.residual_norm() if self._compressor else 0.0

    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for parameter in self._parameters:
            digest.update(parameter.numpy().tobytes())
        return digest.digest()

    def _train_on(self, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = self._model(inputs, training=True)
            loss = self._cross_entropy(logits, labels)
        if not self._local:
            chosen = self._compressor or hvd.Compression.none
            tape = hvd.DistributedGradientTape(tape, compression=chosen)
        gradients = tape.gradient(loss, self._parameters)
        self._optimizer.apply(gradients)
        return loss

    @staticmethod
    def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.cast(labels, tf.int64), logits=logits
        )
        return tf.reduce_mean(each)

    def _gradients_of(self, patterns: Iterable[str]) -> list[str]:
        """The compressor's names for the gradients of parameters whose names match."""
        return [
            self._label(position, variable)
            for position, variable in enumerate(self._model.trainable_variables)
            if any(fnmatchcase(parameter_name(variable), pattern) for pattern in patterns)
        ]

    def _label(self, position: int, variable: keras.Variable) -> str:
        return f"gradient.{position}"


def _optimizer(settings: Settings) -> keras.optimizers.Optimizer:
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == ADAMW:
        return keras.optimizers.AdamW(lr, weight_decay=decay)
    if settings.optimizer == ADAM:
        return _decayed(keras.optimizers.Adam, decay)(lr, epsilon=1e-8)
    if settings.optimizer == RMSPROP:  # Keras adds it under the root.
        return _decayed(keras.optimizers.RMSprop, decay)(lr, rho=RMSPROP_DECAY, epsilon=1e-16)
    return _decayed(keras.optimizers.SGD, decay)(lr, settings.momentum)


def _decayed(kind: Any, decay: float) -> Any:
    """The optimizer with an L2 penalty, as in the papers and in torch: Keras's decay passes momentum by."""
    if not decay:
        return kind

    class Decayed(kind):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            decayed = keras.ops.add(gradient, keras.ops.multiply(decay, variable))
            super().update_step(decayed, variable, learning_rate)

    return Decayed


class TensorFlowTrainer:
    """Implements :class:`benchmarks.loop.Trainer`."""

    _session: ClassVar[type[TensorFlowSession]] = TensorFlowSession

    def __init__(self) -> None:
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def start(
        self, settings: Settings, classes: int, compression: Compression, seed: int
    ) -> TensorFlowSession:
        keras.backend.clear_session()  # Otherwise layers are numbered through all runs.
        keras.utils.set_random_seed(seed)
        model = build(settings.model, classes, settings.norm, settings.dropout)
        return self._session(model, settings, compression, seed)

    def gather(self, values: np.ndarray) -> np.ndarray:
        local = tf.constant(np.ascontiguousarray(values, np.float64))
        gathered: np.ndarray = hvd.allgather(local, name="benchmark").numpy()
        return gathered.reshape(self.size, -1)


def start(threads: int) -> TensorFlowTrainer:
    """Initialises Horovod and TensorFlow in this process."""
    set_up(threads)
    return TensorFlowTrainer()


def set_up(threads: int) -> None:
    """Sets TensorFlow and Horovod up, before either is used."""
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    hvd.init()
