"""Small models that Keras trains on two ranks, and whether the ranks end alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

FEATURES, CLASSES = 64, 10
SAMPLES, BATCH = 64, 16
THRESHOLD = 100
"""Kernels are above it, biases below."""


def samples(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of one rank."""
    inputs = np.random.default_rng(rank).standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return inputs, inputs[:, :CLASSES].argmax(1)


def network() -> keras.Model:
    """A model with other first weights on each rank."""
    keras.utils.set_random_seed(1 + hvd.rank())
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )


def compiled(optimizer: Any, **options: Any) -> keras.Model:
    """:func:`network` with a loss."""
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **options)
    return model


def fit(
    model: keras.Model, callbacks: Sequence[keras.callbacks.Callback] = (), epochs: int = 2
) -> list[float]:
    """Trains on this rank's samples, and returns each epoch's loss."""
    inputs, labels = samples(hvd.rank())
    history = model.fit(
        inputs, labels, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks)
    )
    return history.history["loss"]


def same_everywhere(variables: Sequence[Any]) -> bool:
    """Whether all ranks have the same values, bit for bit."""
    flat = np.concatenate([np.ravel(np.asarray(v)).astype(np.float64) for v in variables])
    gathered = hvd.allgather(tf.constant(flat[None]), name="same everywhere").numpy()
    return bool((gathered == gathered[0]).all())
