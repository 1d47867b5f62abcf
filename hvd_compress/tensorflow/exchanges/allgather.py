"""The allgather: every rank's payload to every rank."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchange.routing import check_gather
from hvd_compress.tensorflow.coder import Encoded
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class Allgather(Exchange):
    """Each rank sends its payload to all others, and adds up what it gets."""

    on_gpu = True

    def check(self, slot: Slot) -> None:
        """See :meth:`Exchange.check`; what tracing does not know is checked when it is encoded."""
        if slot.shape is not None:
            size = slot.route.codec.payload_bytes(slot.shape)
            check_gather(slot.label, size, self.collectives.size)

    def encode(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See :meth:`Exchange.encode`."""
        ranks = self.collectives
        return self.coder.encode(
            slot, gradient, begun, streams=[max(0, ranks.rank)], ranks=ranks.size
        )

    def send(
        self, slot: Slot, gradient: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """See :meth:`Exchange.send`."""
        shape, codec = slot.shape, slot.route.codec
        length = None if shape is None else codec.payload_bytes(shape)
        return self.collectives.gather_alike(message, length, slot.label)

    def decode(self, encoded: Encoded, reduced: tf.Tensor, scale: float) -> tf.Tensor:
        """See :meth:`Exchange.decode`."""
        return self.coder.decode(
            encoded,
            reduced,
            ranks=self.collectives.size,
            scale=scale,
            sum_scale=scale,
        )
