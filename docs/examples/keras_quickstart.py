"""Trains a small Keras 3 model on two ranks with 1-bit gradients.

Start it with: horovodrun --gloo -np 2 python docs/examples/keras_quickstart.py
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.keras as hvdc

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
compressor = hvdc.OneBit()
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
model.compile(
    optimizer=hvdc.DistributedOptimizer(optimizer, compressor),
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
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    for name, route in compressor.routes().items():
        print(f"{name}: {'as it is' if route.uncompressed else route}")
    counters = compressor.counters
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to Horovod: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
    print(f"encoding and decoding: {counters.encode_seconds + counters.decode_seconds:.3f} s")
    print(f"norm of what has not been sent yet: {compressor.residual_norm():.3f}")
hvd.shutdown()
