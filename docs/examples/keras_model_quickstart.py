"""Trains a Keras 3 model by a loop of its own on two ranks, with 8-bit gradients.

Start it with: horovodrun --gloo -np 2 python docs/examples/keras_model_quickstart.py
"""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_compress.tensorflow as hvdc

STEPS, BATCH = 200, 32
FEATURES, CLASSES = 64, 10

hvd.init()
if hvd.size() == 1:
    raise SystemExit("A single rank exchanges nothing: start several, as above.")
tf.config.threading.set_intra_op_parallelism_threads(1)
keras.utils.set_random_seed(1)  # The same task on every rank ...
task = tf.random.normal([FEATURES, CLASSES])
data = tf.random.Generator.from_seed(100 + hvd.rank())  # ... but other samples.

model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(CLASSES)])
model.build([None, FEATURES])
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
optimizer.build(model.trainable_variables)
compressor = hvdc.Int8()

# Horovod wants TensorFlow's variables, which Keras 3 has inside its own.
hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
hvd.broadcast_variables([v.value for v in optimizer.variables], root_rank=0)


@tf.function
def train_step():
    inputs = data.normal([BATCH, FEATURES])
    labels = tf.argmax(inputs @ task, axis=1)
    with tf.GradientTape() as tape:
        logits = model(inputs, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    tape = hvd.DistributedGradientTape(tape, compression=compressor)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


losses = [float(train_step()) for _ in range(STEPS)]

if hvd.rank() == 0:
    counters = compressor.counters
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to Horovod: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
