"""The allgather: every rank's payloads to every rank."""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.exchanges import allgather
from hvd_compress.tensorflow.buckets import Bucket, EncodedMessage
from hvd_compress.tensorflow.coder import Cut
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class Allgather(Exchange):
    """Each rank sends its payloads to all others, and adds up those that it receives."""

    common = allgather.EXCHANGE
    on_gpu = True

    def check(self, slot: Slot) -> None:
        if slot.shape is not None:  # Otherwise it is checked when it is encoded.
            super().check(slot)

    def cut(self, slot: Slot) -> Cut:
        return Cut(self.shared(slot), streams=[self.group.rank])

    def encode(self, bucket: Bucket, token: tf.Tensor, everybody: tf.Tensor) -> EncodedMessage:
        ranks, length = self.collectives.size, bucket.length
        return self.coder.encode(bucket, token, everybody, "payloads", ranks=ranks, length=length)

    def send(self, bucket: Bucket, message: EncodedMessage) -> tf.Tensor:
        return self.collectives.all_gather_alike(message.data, bucket.length, bucket.label)

    def decode(self, bucket: Bucket) -> tf.Operation:
        return self.coder.decode(bucket, "payloads", copies=self.collectives.size)
