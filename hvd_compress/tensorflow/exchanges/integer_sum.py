"""The integer sum: norms first, then levels, both in Horovod's own allreduce."""

from __future__ import annotations

import math

import tensorflow as tf

from hvd_compress.codecs import LevelCodec
from hvd_compress.exchanges import integer_sum
from hvd_compress.tensorflow.buckets import Bucket
from hvd_compress.tensorflow.coder import Cut
from hvd_compress.tensorflow.exchanges.base import Exchange
from hvd_compress.tensorflow.slots import Slot


class IntegerSum(Exchange):
    """Horovod's allreduce, with its rings and its fusion, adds levels as integers (TernGrad, section 3.1).

    TensorFlow's executor computes the levels when the ranks' norms are known.
    """

    common = integer_sum.EXCHANGE
    content = "norms"

    def cut(self, slot: Slot) -> Cut:
        codec, ranks = slot.route.codec, self.collectives
        assert isinstance(codec, LevelCodec) and slot.shape is not None
        return Cut(
            self.shared(slot),
            streams=[self.group.rank],
            parts=[(0, math.prod(slot.shape))],
            bits=integer_sum.bits_of(codec, ranks.size),
            norms=codec.layout(slot.shape).scales,
        )

    def send(self, bucket: Bucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        ranks = self.collectives
        norms = ranks.all_reduce_max(ranks.numbers(message), f"{bucket.label}.norms")
        words = ranks.all_reduce(self.coder.run("levels", bucket, norms), f"{bucket.label}.levels")
        return tf.concat([ranks.bytes(norms), ranks.bytes(words)], 0)

    def decode(self, bucket: Bucket) -> tf.Operation:
        return self._decode(bucket, "levels", copies=self.collectives.size)
