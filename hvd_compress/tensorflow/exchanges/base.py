"""What every exchange does for a bucket of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import tensorflow as tf

from hvd_compress.exchanges.shards import Shared, shared
from hvd_compress.ranks.counters import Counters
from hvd_compress.tensorflow.buckets import Bucket, EncodedMessage
from hvd_compress.tensorflow.coder import Coder, Cut
from hvd_compress.tensorflow.collectives import Collectives
from hvd_compress.tensorflow.slots import Slot


class Exchange(ABC):
    """Traces a bucket's way to the other ranks and back.

    Args:
        collectives: the ranks.
        coder: what this rank encodes and decodes with.

    Attributes:
        has_residuals: whether ranks keep residuals of their own gradients.
        on_gpu: whether its operations have kernels for GPUs.
    """

    has_residuals: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = False

    def __init__(self, collectives: Collectives, coder: Coder) -> None:
        self.collectives = collectives
        self.coder = coder

    @property
    def owners(self) -> int:
        """How many ranks share a gradient out, and keep residuals for the averages of their parts."""
        return 0

    def shared(self, slot: Slot) -> Shared | None:
        """How ranks share a gradient out; None where they do not."""
        if not self.owners or slot.shape is None:
            return None
        return shared(slot.route.codec, slot.shape)

    def count(self, counters: Counters, gathered: int, distributed: int, kept: int) -> None:
        """Adds what was sent by and to owners on this host to the counters.

        Args:
            counters: to be added to.
            gathered: bytes of this rank's payloads for gathers.
            distributed: bytes that it sent to owners.
            kept: those of them that it sent to itself.
        """
        return

    @abstractmethod
    def check(self, slot: Slot) -> None:
        """Raises ``ValueError`` where a gradient cannot take this exchange."""

    @abstractmethod
    def cut(self, slot: Slot) -> Cut:
        """How a gradient is encoded."""

    @abstractmethod
    def encode(self, bucket: Bucket, token: tf.Tensor, everybody: tf.Tensor) -> EncodedMessage:
        """Encodes the gradients, once all are there.

        Args:
            bucket: of the gradients.
            token: of the first one.
            everybody: whether all ranks take part in the step, shape=(), bool.
        """

    @abstractmethod
    def send(self, bucket: Bucket, message: EncodedMessage) -> tf.Tensor:
        """Sends an encoded message, in a step in which all ranks take part.

        Returns:
            What comes back, shape=(bytes,), uint8.
        """

    @abstractmethod
    def decode(self, bucket: Bucket) -> tf.Operation:
        """Makes the results of what came back; an operation that has to be run."""

    def _check_shape(self, slot: Slot) -> None:
        """Raises ``ValueError`` where messages cannot be laid out while tracing, as some exchanges do."""
        if slot.shape is None:
            raise ValueError(
                f"{slot.label}: expected a gradient whose shape tracing knows for exchange="
                f"{slot.route.exchange!r}, got {slot.kind}: give it one with tf.ensure_shape, exclude it "
                f"by name, or use the allgather"
            )
