"""Trains on two ranks of Horovod in TensorFlow and in Keras, with compressors or without them."""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_compress.keras as of_keras
import hvd_compress.tensorflow as hvdc
from hvd_compress import Int8


def _with_a_tape(use: bool) -> hvdc.Compressor:
    compressor = hvdc.Int8()
    weights = tf.Variable(tf.ones([64, 64]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * weights)
    options = {"compression": compressor} if use else {}
    tape = hvd.DistributedGradientTape(tape, **options)
    (gradient,) = tape.gradient(loss, [weights])
    weights.assign_sub(0.1 * gradient)
    return compressor


def _with_keras(use: bool) -> keras.optimizers.Optimizer:
    optimizer = of_keras.DistributedOptimizer(keras.optimizers.SGD(), Int8())
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(optimizer if use else "sgd", loss="mse")
    model.fit(tf.ones([8, 64]), tf.ones([8, 64]), verbose=0)
    if not use:
        path = f"{sys.argv[2]}/{hvd.rank()}.keras"
        model.save(path)
        of_keras.load_model(path, Int8()).evaluate(tf.ones([8, 64]), tf.ones([8, 64]), verbose=0)
    return optimizer


def _main(use: bool) -> None:
    hvd.init()
    kept = _with_a_tape(use), _with_keras(use)
    print("trained", len(kept))


_main(sys.argv[1] == "used")
