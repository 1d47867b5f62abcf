"""The allgather: every rank's payloads to every rank."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd_compress.exchanges import allgather
from hvd_compress.exchanges.layout import MessageLayout, Piece, whole
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.exchanges.base import GraphExchange, member_of
from hvd_compress.tensorflow.slots import GraphSlot


class Allgather(GraphExchange):
    """Each rank sends its payloads to all others, and adds up those that it receives."""

    common = allgather.EXCHANGE
    gathers = True

    def check(self, slot: GraphSlot) -> None:
        if slot.shape is not None:  # Otherwise it is checked when it is encoded.
            super().check(slot)

    def layouts(self, slots: Sequence[GraphSlot]) -> list[MessageLayout]:
        rank = self.group.rank
        if slots[0].shape is None:  # Alone in its bucket; HvdcEncode fills in rows and columns.
            piece = Piece(0, slots[0].route.codec, 0, 0, (-1,), rank, 0, 0)
            return [MessageLayout((piece,), 0, 0)]
        return [whole(list(map(member_of, slots)), rank)]

    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        return self.collectives.all_gather_alike(message, bucket.length, bucket.label)

    def decode(self, bucket: GraphBucket) -> tf.Operation:
        return self._decode(bucket, "payloads")
