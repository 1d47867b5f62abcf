"""Trains a small Keras 3 model with 1-bit gradients on hosts that come and go.

Start it with a script that prints the hosts there are, each with its slots, as in "host1:2":

    horovodrun --gloo -np 2 --min-np 1 --host-discovery-script ./hosts.sh \
        python docs/examples/keras_elastic_quickstart.py
"""

import argparse
import logging
import os

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress.keras.elastic import CommitState, KerasState

BATCH = 32
BATCHES_AN_EPOCH = 10
FEATURES, CLASSES = 64, 10

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
arguments = parser.parse_args()

logging.basicConfig(level=logging.INFO)  # Says what has become of lost ranks' residuals.
hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
keras.utils.set_random_seed(1)
task = np.random.default_rng(1).standard_normal((FEATURES, CLASSES))
model = keras.Sequential(
    [
        keras.Input((FEATURES,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=False,  # Horovod's operations cannot be compiled by XLA.
)
state = KerasState(model, epoch=0, share_residuals=True)


@hvd.elastic.run
def train(state: KerasState) -> None:
    """Goes on from ``state.epoch``, with the ranks that there are."""
    compressor = state.begin(hvdc.OneBit())  # A new one each time, and its first call.
    data = np.random.default_rng([state.epoch, hvd.rank()])
    inputs = data.standard_normal((BATCHES_AN_EPOCH * BATCH, FEATURES)).astype(np.float32)

    def say(epoch: int, logs: dict) -> None:
        counters = compressor.counters
        sent = counters.ratio
        print(
            f"epoch {epoch + 1}: rank {hvd.rank()} of {hvd.size()}, process {os.getpid()}, "
            f"loss {logs['loss']:.3f}, bytes {sent:.3f} of uncompressed",
            flush=True,
        )

    model.fit(
        inputs,
        (inputs @ task).argmax(1),
        batch_size=BATCH,
        epochs=arguments.epochs,
        initial_epoch=state.epoch,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=say), CommitState(state)],
    )


train(state)
weights = sum(float(weight.sum(dtype=np.float64)) for weight in model.get_weights())
print(f"rank {hvd.rank()} of {hvd.size()} ends with weights {weights:.12f}", flush=True)
hvd.shutdown()
