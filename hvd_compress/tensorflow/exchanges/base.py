"""The interface of an exchange, which handles one bucket of gradients at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from hvd_compress.exchanges import base
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.layout import Member, MessageLayout
from hvd_compress.exchanges.shards import Shared, shared
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Coder
from hvd_compress.tensorflow.collectives import GraphCollectives
from hvd_compress.tensorflow.slots import GraphSlot


class GraphExchange(ABC):
    """Traces the way of a bucket to the other ranks and back.

    Args:
        collectives: the collectives among the ranks.
        coder: this rank's encoder and decoder.

    Attributes:
        common: the exchange's description, which does not depend on TensorFlow.
        gathers: whether all ranks gather first messages.
    """

    common: ClassVar[base.Exchange]
    gathers: ClassVar[bool] = False

    def __init__(self, collectives: GraphCollectives, coder: Coder) -> None:
        self.collectives = collectives
        self.coder = coder

    @property
    def group(self) -> Group:
        """The ranks."""
        return Group(max(0, self.collectives.rank), self.collectives.size)

    @property
    def owners(self) -> int:
        """The number of ranks that share out a gradient and keep residuals of their parts' averages."""
        owners = self.common.owners(self.group)
        return owners.size if owners else 0

    def shared(self, slot: GraphSlot) -> Shared | None:
        """The order and the parts in which ranks share out a gradient; None where they do not."""
        if not self.owners or slot.shape is None:
            return None
        return shared(slot.route.codec, slot.shape)

    def check(self, slot: GraphSlot) -> None:
        """Raises ``ValueError`` where a gradient cannot take this exchange."""
        if slot.shape is None:
            raise ValueError(
                f"{slot.label}: expected a gradient whose shape tracing knows for exchange="
                f"{slot.route.exchange!r}, got {slot.kind}: give it one with tf.ensure_shape, exclude it "
                f"by name, or use the allgather"
            )
        slot.route.check(slot.label, slot.shape, slot.dtype.size, self.group)

    @abstractmethod
    def layouts(self, slots: Sequence[GraphSlot]) -> list[MessageLayout]:
        """The layouts of a bucket's messages: of payloads and, if ranks own parts, of their averages."""

    def ordered(self, slot: GraphSlot, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient in the order of the layouts: as it is, or its transposed matrix."""
        matrix = self._transposed(slot)
        return tf.transpose(tf.reshape(gradient, matrix)) if matrix else gradient

    def restored(self, slot: GraphSlot, result: tf.Tensor) -> tf.Tensor:
        """The result in the gradient's shape; the inverse of :meth:`ordered`."""
        return tf.reshape(tf.transpose(result), slot.shape) if self._transposed(slot) else result

    def encode(self, bucket: GraphBucket, token: tf.Tensor, everybody: tf.Tensor) -> Any:
        """Encodes the gradients, once all of them are available, and moves residuals on.

        Args:
            bucket: the bucket of the gradients.
            token: the token of the first gradient.
            everybody: whether all ranks take part in the step, shape=(), bool; if not, nothing is encoded.

        Returns:
            The message, the number of bytes for each owner, and whether the message is encoded, shape=(),
            bool; if not, it holds the gradients as float32.
        """
        ranks = self.collectives.size if self.gathers else 1
        inputs = token, everybody
        return self.coder.run(
            "encode", bucket, *inputs, warmup=self.coder.warmup_steps, ranks=ranks
        )

    @abstractmethod
    def send(self, bucket: GraphBucket, message: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """Sends an encoded message, in a step in which all ranks take part.

        Args:
            bucket: the bucket of the gradients.
            message: shape=(bytes,), uint8.
            sizes: the number of bytes for each owner, shape=(owners,), int32.

        Returns:
            The received message, shape=(bytes,), uint8.
        """

    @abstractmethod
    def decode(self, bucket: GraphBucket) -> tf.Operation:
        """Decodes the received message into the results; returns an operation that has to run."""

    def _decode(self, bucket: GraphBucket, what: str) -> tf.Operation:
        """Decodes all ranks' ``"payloads"``, or all owners' ``"averages"``."""
        inputs = bucket.arrived, bucket.encoded
        return self.coder.run("decode", bucket, *inputs, what=what, ranks=self.collectives.size)

    def _transposed(self, slot: GraphSlot) -> tuple[int, int] | None:
        """Rows and columns of a gradient whose parts are those of its transposed matrix."""
        found = self.shared(slot)
        return found.transposed if found else None


def member_of(slot: GraphSlot) -> Member:
    """A gradient as the member of a bucket; its shape is known."""
    assert slot.shape is not None
    return Member(slot.index, slot.shape, slot.route.codec)
