"""The operations that encode and decode, with their attributes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.shards import Shared
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.native import spec_bytes
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.slots import GraphSlot


@dataclass(frozen=True)
class Cut:
    """The pieces in which an exchange encodes a gradient.

    Attributes:
        shared: the division of the gradient among ranks; None if there is none.
        streams: the rank in the noise key of each payload.
        parts: the range [begin, end) of elements of each owner of gradient 0, which is encoded as a tensor
            of its own; empty for the whole gradient. The parts of gradient i belong to the next owners but
            i - 1. Elements have the order of :meth:`ordered`.
        own: the number of the part that this rank owns.
        own_stream: the rank in the noise key of the average of this rank's part.
    """

    shared: Shared | None
    streams: Sequence[int]
    parts: Sequence[tuple[int, int]] = ()
    own: int = 0
    own_stream: int = 0

    def ordered(self, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient, or its transposed matrix."""
        matrix = self.shared and self.shared.transposed
        return tf.transpose(tf.reshape(gradient, matrix)) if matrix else gradient

    def restored(self, result: tf.Tensor, shape: Shape) -> tf.Tensor:
        """The result in the gradient's shape; the inverse of :meth:`ordered`."""
        matrix = self.shared and self.shared.transposed
        return tf.reshape(tf.transpose(result), shape) if matrix else result


class Coder:
    """The encoder and decoder of one rank.

    Args:
        operations: the module of operations.
        ledger: the compressor's ledger.
        seed: the seed of the noise.
        warmup_steps: the number of first exchanges of each gradient that are not encoded.
        threads: kernel threads; None is TensorFlow's number for one operation.
        device: the device that encodes and decodes, and holds the residuals.
    """

    def __init__(
        self,
        operations: Any,
        ledger: tf.Tensor,
        seed: int,
        warmup_steps: int,
        threads: int | None,
        device: str = HOST,
    ) -> None:
        self._ops = operations
        self._ledger = ledger
        self._seed = seed
        self.warmup_steps = warmup_steps
        self._threads = threads
        self._device = device

    @property
    def threads(self) -> int:
        """The number of threads of one kernel."""
        threads = self._threads or tf.config.threading.get_intra_op_parallelism_threads()
        return threads or len(os.sched_getaffinity(0))

    def submit(
        self,
        bucket: GraphBucket,
        member: int,
        gradient: tf.Tensor,
        begun: tf.Tensor,
        cut: Cut,
        state: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Gives a gradient to its bucket.

        Args:
            bucket: the bucket of the gradient.
            member: the number of the gradient in the bucket.
            gradient: the gradient in the slot's shape, after :meth:`Cut.ordered`.
            begun: the tensor on which all messages of the step depend.
            cut: the pieces in which the gradient is encoded.
            state: the tensors of :attr:`GraphSlot.handles`.

        Returns:
            The token that stands for the gradient, shape=(1,), float32.
        """
        slot = bucket.slots[member]
        return self.run(
            "submit",
            bucket,
            gradient,
            begun,
            *state,
            member=member,
            begins=[begin for begin, _ in cut.parts],
            lengths=[end - begin for begin, end in cut.parts],
            streams=cut.streams,
            own=cut.own,
            own_stream=cut.own_stream,
            **self._attributes(slot, cut.shared.codec if cut.shared else slot.route.codec),
        )

    def run(
        self, operation: str, bucket: GraphBucket, *inputs: tf.Tensor, **attributes: Any
    ) -> Any:
        """Runs an operation on a bucket, on the device.

        Args:
            operation: the end of its name, as in ``HvdcDecode``. The files in ``ops`` describe what each
                does, its inputs, attributes and outputs.
            bucket: the bucket of the gradients.
            inputs: the inputs before the ledger.
            attributes: the attributes besides the bucket.
        """
        run = getattr(self._ops, f"hvdc_{operation}")
        with tf.device(self._device):
            return run(*inputs, self._ledger, bucket=bucket.number, **attributes)

    def _attributes(self, slot: GraphSlot, codec: Codec) -> dict[str, Any]:
        return {
            "label": slot.label,
            "spec": spec_bytes(codec),
            "seed": self._seed,
            "threads": self.threads,
            "alpha": slot.route.feedback.alpha,
            "beta": slot.route.feedback.beta,
        }
