"""The integer sum: norms first, then levels, both in Horovod's own allreduce."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchange import integer_sum
from hvd_compress.tensorflow.coder import Encoded
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class IntegerSum(Exchange):
    """Horovod adds the ranks' levels as integers (TernGrad, section 3.1): its rings, its fusion.

    TensorFlow's executor makes the levels when the ranks' norms are there.
    """

    def check(self, slot: Slot) -> None:
        """See :meth:`Exchange.check`: norms and words are counted while tracing."""
        self._check_shape(slot)
        integer_sum.check(slot.label, slot.route.codec, self.collectives.size)

    def encode(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See :meth:`Exchange.encode`: the message are norms, float32."""
        return self.coder.norms(slot, gradient, begun, bits=self._bits(slot))

    def send(
        self, slot: Slot, gradient: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """See :meth:`Exchange.send`: the largest norms and the sum of the levels come back."""
        ranks = self.collectives
        norms = ranks.maximum(message, f"{slot.label}.norms")
        words = self.coder.levels(
            slot, gradient, norms, step, bits=self._bits(slot), stream=max(0, ranks.rank)
        )
        total = ranks.sum(words, f"{slot.label}.levels")
        return tf.concat([_bytes_of(norms), _bytes_of(total)], 0)

    def decode(self, encoded: Encoded, reduced: tf.Tensor, scale: float) -> tf.Tensor:
        """See :meth:`Exchange.decode`."""
        return self.coder.decode_levels(
            encoded,
            reduced,
            bits=self._bits(encoded.slot),
            ranks=self.collectives.size,
            scale=scale,
        )

    def _bits(self, slot: Slot) -> int:
        size = self.collectives.size
        codec = integer_sum.check(slot.label, slot.route.codec, size)
        return integer_sum.bits_of(codec, size)


def _bytes_of(numbers: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])
