"""The two-shot exchange: parts to their owners, averages from them."""

from __future__ import annotations

import math

import tensorflow as tf

from hvd_compress.exchange import two_shot
from hvd_compress.exchange.shards import Shards
from hvd_compress.tensorflow.coder import Encoded
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class TwoShot(Exchange):
    """What a rank sends does not depend on the number of ranks (1-bit SGD, section 3.1).

    TensorFlow's executor starts the second shot when the first one is over: they are a chain of operations.
    Each gradient travels by itself.
    """

    on_gpu = True

    @property
    def owners(self) -> int:
        """See :attr:`Exchange.owners`."""
        return self.collectives.size

    def check(self, slot: Slot) -> None:
        """See :meth:`Exchange.check`: parts are cut while tracing."""
        self._check_shape(slot)
        two_shot.check(slot.label, slot.route.codec, self._shards(slot))

    def encode(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See :meth:`Exchange.encode`: the payloads for all owners, one after the other."""
        rank, size = self.collectives.rank, self.collectives.size
        return self.coder.encode(
            slot,
            gradient,
            begun,
            streams=[two_shot.first_stream(rank, owner, size) for owner in range(size)],
            ranks=size,
            parts=self._parts(slot),
        )

    def send(
        self, slot: Slot, gradient: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """See :meth:`Exchange.send`: the averages' payloads come back, one of each owner."""
        rank, size = self.collectives.rank, self.collectives.size
        shards = self._shards(slot)
        sizes = shards.payload_bytes(slot.route.codec)
        average = self.coder.average(
            slot,
            self.collectives.distribute(message, sizes, f"{slot.label}.to_owners"),
            step,
            length=shards.length(rank),
            stream=two_shot.second_stream(rank, size),
            ranks=size,
            distributed=sum(sizes),
            kept=sizes[rank],
        )
        length = sizes[0] if len(set(sizes)) == 1 else None
        return self.collectives.gather_alike(average, length, f"{slot.label}.from_owners")

    def decode(self, encoded: Encoded, reduced: tf.Tensor, scale: float) -> tf.Tensor:
        """See :meth:`Exchange.decode`."""
        size = self.collectives.size
        return self.coder.decode(
            encoded,
            reduced,
            ranks=1,
            scale=scale * size,
            sum_scale=scale,
            parts=self._parts(encoded.slot),
        )

    def _shards(self, slot: Slot) -> Shards:
        assert slot.shape is not None
        return Shards(math.prod(slot.shape), self.collectives.size, slot.index)

    def _parts(self, slot: Slot) -> list[tuple[int, int]]:
        shards = self._shards(slot)
        return [shards.of(owner) for owner in range(shards.size)]
