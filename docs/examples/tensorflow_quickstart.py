"""Trains a small network on two ranks with 8-bit gradients.

Start it with: horovodrun --gloo -np 2 python docs/examples/tensorflow_quickstart.py
"""

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_compress.tensorflow as hvdc

STEPS = 200
BATCH = 32
FEATURES, HIDDEN, CLASSES = 64, 128, 10
RATE, MOMENTUM = 0.05, 0.9

hvd.init()
if hvd.size() == 1:
    raise SystemExit("A single rank exchanges nothing: start several, as above.")
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.random.set_seed(1)  # The same task and the same first weights on every rank ...
task = tf.random.normal([FEATURES, CLASSES])
weights = [
    tf.Variable(tf.random.normal([FEATURES, HIDDEN], stddev=FEATURES**-0.5)),
    tf.Variable(tf.zeros([HIDDEN])),
    tf.Variable(tf.random.normal([HIDDEN, CLASSES], stddev=HIDDEN**-0.5)),
    tf.Variable(tf.zeros([CLASSES])),
]
velocities = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
hvd.broadcast_variables(weights, root_rank=0)
data = tf.random.Generator.from_seed(100 + hvd.rank())  # ... but other samples.

compressor = hvdc.Int8()


@tf.function
def train_step():
    inputs = data.normal([BATCH, FEATURES])
    labels = tf.argmax(inputs @ task, axis=1)
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(inputs @ weights[0] + weights[1])
        logits = hidden @ weights[2] + weights[3]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    tape = hvd.DistributedGradientTape(tape, compression=compressor)
    gradients = tape.gradient(loss, weights)
    for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
        velocity.assign(MOMENTUM * velocity + gradient)
        weight.assign_sub(RATE * velocity)
    return loss


losses = [float(train_step()) for _ in range(STEPS)]

if hvd.rank() == 0:
    print(f"loss: {sum(losses[:20]) / 20:.3f} at first, {sum(losses[-20:]) / 20:.3f} at last")
    for name, route in compressor.routes().items():
        print(f"{name}: {'as it is' if route.uncompressed else route}")
    counters = compressor.counters
    print(f"bytes a step without compression: {counters.per_step.uncompressed_bytes:.0f}")
    print(f"bytes a step handed to Horovod: {counters.per_step.message_bytes:.0f}")
    print(f"bytes a step on the wire: {counters.per_step.wire_bytes:.0f}")
    print(f"encoding and decoding: {counters.encode_seconds + counters.decode_seconds:.3f} s")
hvd.shutdown()
