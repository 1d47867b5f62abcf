"""What every exchange does for a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import tensorflow as tf

from hvd_compress.exchange.counters import Counters
from hvd_compress.tensorflow.coder import Coder, Encoded
from hvd_compress.tensorflow.collectives import Collectives
from hvd_compress.tensorflow.slots import Slot


class Exchange(ABC):
    """Traces a gradient's way to the other ranks and back.

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
    def encode(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes a gradient, once its step has begun.

        Returns:
            This rank's first message, 1-dimensional, empty while the gradient warms up; and the position in
            the noise, shape=(), int64, negative then.
        """

    @abstractmethod
    def send(
        self, slot: Slot, gradient: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Sends the message, in a step in which all ranks take part.

        Args:
            slot: whose gradient.
            gradient: as :meth:`encode` got it.
            message: its message.
            step: its position in the noise.

        Returns:
            What comes back, shape=(bytes,), uint8.
        """

    @abstractmethod
    def decode(self, encoded: Encoded, reduced: tf.Tensor, scale: float) -> tf.Tensor:
        """Makes the result of what came back.

        Args:
            encoded: what came back, and of what.
            reduced: the token, when Horovod has reduced it.
            scale: the factor on the sum of the ranks' gradients.
        """

    def _check_shape(self, slot: Slot) -> None:
        """Raises ``ValueError`` where messages cannot be laid out while tracing, as some exchanges do."""
        if slot.shape is None:
            raise ValueError(
                f"{slot.label}: expected a gradient whose shape tracing knows for exchange="
                f"{slot.route.exchange!r}, got {slot.kind}: give it one with tf.ensure_shape, exclude it "
                f"by name, or use the allgather"
            )
