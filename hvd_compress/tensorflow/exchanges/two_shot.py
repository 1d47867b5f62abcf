"""The two-shot exchange: ranks send parts to their owners, and owners send averages to all ranks."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchanges import two_shot
from hvd_compress.exchanges.shards import Shards, Shared
from hvd_compress.tensorflow.buckets import Bucket, EncodedMessage
from hvd_compress.tensorflow.coder import Cut
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class TwoShot(Exchange):
    """Sends a number of bytes that does not grow with the number of ranks (1-bit SGD, section 3.1).

    TensorFlow's executor starts the second shot when the first one is over: they are a chain of operations.
    """

    on_gpu = True

    @property
    def owners(self) -> int:
        return self.collectives.size

    def check(self, slot: Slot) -> None:
        self._check_shape(slot)
        two_shot.check(slot.label, self._shared(slot).codec, self._shards(slot))

    def cut(self, slot: Slot) -> Cut:
        rank, size, shards = self.collectives.rank, self.collectives.size, self._shards(slot)
        return Cut(
            self._shared(slot),
            streams=[two_shot.first_stream(rank, owner, size) for owner in range(size)],
            parts=[shards.of(owner) for owner in range(size)],
            own=max(0, rank),
            own_stream=two_shot.second_stream(rank, size),
        )

    def encode(self, bucket: Bucket, token: tf.Tensor, everybody: tf.Tensor) -> EncodedMessage:
        return self.coder.encode(bucket, token, everybody, "payloads", ranks=1)

    def send(self, bucket: Bucket, message: EncodedMessage) -> tf.Tensor:
        ranks = self.collectives
        parts = ranks.all_to_all(message.data, message.sizes, f"{bucket.label}.to_owners")
        averages = self.coder.average(bucket, parts, ranks=ranks.size)
        return ranks.all_gather_alike(averages, self._length(bucket), f"{bucket.label}.from_owners")

    def decode(self, bucket: Bucket) -> tf.Operation:
        return self.coder.decode(bucket, "averages", copies=1, weight=self.collectives.size)

    def _length(self, bucket: Bucket) -> int | None:
        """The number of bytes of each owner's averages, where it is known and the same for all."""
        slot = bucket.slots[0]
        sizes = set(self._shards(slot).payload_bytes(self._shared(slot).codec))
        return sizes.pop() if bucket.length is not None and len(sizes) == 1 else None

    def _shared(self, slot: Slot) -> Shared:
        found = self.shared(slot)
        assert found is not None
        return found

    def _shards(self, slot: Slot) -> Shards:
        return self._shared(slot).shards(self.collectives.size, slot.key)
