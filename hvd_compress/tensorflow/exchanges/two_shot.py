"""The two-shot exchange: ranks send parts to their owners, and owners send averages to all ranks."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchanges import two_shot
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Cut
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.slots import GraphSlot


class TwoShot(GraphExchange):
    """Sends a number of bytes that does not grow with the number of ranks (1-bit SGD, section 3.1).

    TensorFlow's executor starts the second shot when the first one is over: they are a chain of operations.
    """

    common = two_shot.EXCHANGE

    def cut(self, slot: GraphSlot) -> Cut:
        rank, size, (shards, _) = self.group.rank, self.owners, self._shards(slot)
        return Cut(
            self.shared(slot),
            streams=[two_shot.first_stream(rank, owner, size) for owner in range(size)],
            parts=[shards.of(owner) for owner in range(size)],
            own=rank,
            own_stream=two_shot.second_stream(rank, size),
        )

    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        ranks = self.collectives
        parts = ranks.all_to_all(message, sizes, f"{bucket.label}.to_owners")
        averages = self.coder.run("average", bucket, parts, ranks=ranks.size)
        return ranks.all_gather_alike(averages, self._length(bucket), f"{bucket.label}.from_owners")

    def decode(self, bucket: GraphBucket) -> tf.Operation:
        return self._decode(bucket, "averages")

    def _length(self, bucket: GraphBucket) -> int | None:
        """The number of bytes of each owner's averages, where it is known and the same for all."""
        shards, codec = self._shards(bucket.slots[0])
        sizes = set(shards.payload_bytes(codec))
        return sizes.pop() if bucket.length is not None and len(sizes) == 1 else None
