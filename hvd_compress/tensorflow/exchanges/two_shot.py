"""The two-shot exchange: ranks send parts to their owners, and owners send averages to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd_compress.exchanges import two_shot
from hvd_compress.exchanges.layout import MessageLayout
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.exchanges.base import GraphExchange, member_of
from hvd_compress.tensorflow.slots import GraphSlot


class TwoShot(GraphExchange):
    """Sends a number of bytes that does not grow with the number of ranks (1-bit SGD, section 3.1).

    TensorFlow's executor starts the second shot when the first one is over: they are a chain of operations.
    """

    common = two_shot.EXCHANGE

    def layouts(self, slots: Sequence[GraphSlot]) -> list[MessageLayout]:
        rank, size, members = self.group.rank, self.owners, list(map(member_of, slots))
        owners = two_shot.owners(self.group)
        return [
            owners.sections(members, lambda owner: two_shot.first_stream(rank, owner, size)),
            owners.received(members, stream=two_shot.second_stream(rank, size)),
        ]

    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        ranks = self.collectives
        parts = ranks.all_to_all(message, sizes, f"{bucket.label}.to_owners")
        averages = self.coder.run("average", bucket, parts, ranks=ranks.size)
        return ranks.all_gather_alike(averages, self._length(bucket), f"{bucket.label}.from_owners")

    def decode(self, bucket: GraphBucket) -> tf.Operation:
        return self._decode(bucket, "averages")

    def _length(self, bucket: GraphBucket) -> int | None:
        """The number of bytes of each owner's averages, where it is known and the same for all."""
        sections = set(self.layouts(bucket.slots)[0].sections)
        known = bucket.length is not None and len(sections) == 1
        return sections.pop() if known else None
