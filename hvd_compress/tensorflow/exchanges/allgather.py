"""The allgather: every rank's payloads to every rank."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchanges import allgather
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Cut
from hvd_compress.tensorflow.exchanges.base import GraphExchange
from hvd_compress.tensorflow.slots import GraphSlot


class Allgather(GraphExchange):
    """Each rank sends its payloads to all others, and adds up those that it receives."""

    common = allgather.EXCHANGE
    gathers = True

    def check(self, slot: GraphSlot) -> None:
        if slot.shape is not None:  # Otherwise it is checked when it is encoded.
            super().check(slot)

    def cut(self, slot: GraphSlot) -> Cut:
        return Cut(self.shared(slot), streams=[self.group.rank])

    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        return self.collectives.all_gather_alike(message, bucket.length, bucket.label)

    def decode(self, bucket: GraphBucket) -> tf.Operation:
        return self._decode(bucket, "payloads")
