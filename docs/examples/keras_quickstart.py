"""Trains a small Keras 3 model on two ranks with 8-bit gradients.

Start it with: horovodrun --gloo -np 2 python docs/examples/keras_quickstart.py
With --uncompressed at the end, it trains without compression.
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.keras as hvdc
from hvd_compress import Int8, NoCompression

STEPS = 200
BATCH = 32
FEATURES, CLASSES = 64, 10

hvd.init()
if hvd.size() == 1:
    raise SystemExit("A single rank exchanges nothing: start several, as above.")
keras.utils.set_random_seed(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
task = np.random.default_rng(1).standard_normal((FEATURES, CLASSES))  # The same on every rank ...
data = np.random.default_rng(100 + hvd.rank())  # ... but other samples.
inputs = data.standard_normal((STEPS * BATCH, FEATURES)).astype(np.float32)
labels = (inputs @ task).argmax(1)

model = keras.Sequential(
    [
        keras.Input((FEATURES,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
)
codec = NoCompression() if "--uncompressed" in sys.argv else Int8()
optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), codec)
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=False,  # Horovod's operations cannot be compiled by XLA.
)
history = model.fit(
    inputs,
    labels,
    batch_size=BATCH,
    epochs=4,
    verbose=0,
    callbacks=[
        hvdc.BroadcastVariables(),  # The same first weights on every rank,
        hvdc.CompareWeights(),  # and an error if they do not stay so.
    ],
)

if hvd.rank() == 0:
    losses = history.history["loss"]
    inputs = data.standard_normal((5000, FEATURES)).astype(np.float32)
    right = (model.predict(inputs, verbose=0).argmax(1) == (inputs @ task).argmax(1)).mean()
    counters = optimizer.compression.counters.per_step
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    print(f"accuracy on new samples: {right:.1%}")
    print(f"bytes a step: {counters.wire_bytes:.0f} for {counters.uncompressed_bytes:.0f}")
hvd.shutdown()
