"""Legacy Keras: Horovod's own optimizer calls our compressors."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvdc
from hvd_compress.codecs import CODECS
from tests.ranks import on_ranks

THRESHOLD = 100


def _trained(compressor: Any) -> list[float]:
    import horovod.tensorflow.keras as horovod_keras
    from tensorflow import keras

    assert keras.optimizers.SGD.__module__.startswith("tf_keras.")
    keras.utils.set_random_seed(1 + hvd.rank())
    model = keras.Sequential(
        [keras.layers.Dense(32, activation="relu", input_shape=(64,)), keras.layers.Dense(10)]
    )
    optimizer = horovod_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression=compressor
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hvd.broadcast_variables(model.variables, root_rank=0)
    inputs = np.random.default_rng(hvd.rank()).standard_normal((64, 64)).astype(np.float32)
    labels = inputs[:, :10].argmax(1)
    losses = model.fit(inputs, labels, batch_size=16, epochs=3, verbose=0).history["loss"]
    flat = tf.concat([tf.reshape(v, [-1]) for v in model.variables], 0)
    gathered = hvd.allgather(flat[None], name="weights").numpy()
    assert np.array_equal(gathered[0], gathered[1])
    return losses


@on_ranks(2, launcher="tensorflow", environment={"TF_USE_LEGACY_KERAS": "1"})
def test_every_codec() -> None:
    for name in CODECS:
        compressor = hvdc.Compressor(name, threshold=THRESHOLD)
        losses = _trained(compressor)
        assert losses[-1] < 0.95 * losses[0], name
        assert compressor.counters.steps == 3 * 64 // 16


@on_ranks(2, launcher="tensorflow", environment={"TF_USE_LEGACY_KERAS": "1"})
def test_a_partial_optimizer_beside_keras_3() -> None:
    """The kind of the optimizer counts, not the version of Keras that is installed."""
    import horovod.keras as horovod_keras
    from tensorflow import keras

    layer = keras.layers.Dense(3, input_shape=(5,))
    compressor = hvdc.OneBit(threshold=THRESHOLD)
    optimizer = horovod_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=compressor, local_layers=[layer]
    )
    assert type(optimizer).__mro__[1].__module__.startswith("tf_keras.")
