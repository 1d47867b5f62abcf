"""What a compressor keeps for one gradient, and which one a gradient is.

Horovod hands a compressor a tensor without a name. Graphs are traced in the same order on every rank,
so that the position among the calls within one outermost graph tells whose it is.
"""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchange.routing import Route


class Slot(tf.Module):
    """The state of one gradient, in variables, which checkpoints save.

    Attributes:
        index: its position: its id in the noise.
        label: what its collectives are called by.
        kind: dtype and shape as first traced; unknown dimensions as None.
        route: how it travels.
        residual: what has been computed but not yet sent, shape=(n,), float32; empty before the first step.
        exchanges: how many times it has been exchanged, shape=(), int64.
    """

    def __init__(self, index: int, kind: str, route: Route) -> None:
        super().__init__(name=f"gradient_{index}")
        self.index = index
        self.label = f"gradient.{index}"
        self.kind = kind
        self.route = route
        self.residual = tf.Variable(
            tf.zeros([0]), trainable=False, shape=tf.TensorShape([None]), name="residual"
        )
        self.exchanges = tf.Variable(tf.zeros([], tf.int64), trainable=False, name="exchanges")


def kind_of(gradient: tf.Tensor) -> str:
    """A gradient's dtype and shape, for comparison and for messages."""
    shape = gradient.shape.as_list() if gradient.shape.rank is not None else "unknown"
    return f"{gradient.dtype.name} {shape}"
