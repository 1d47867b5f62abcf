"""The operations that encode and decode, and the tables that they read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_compress.codecs import NoiseKey
from hvd_compress.exchanges.layout import MessageLayout
from hvd_compress.kernels.batch import Entry
from hvd_compress.kernels.cuda_library import table_of
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.native import operations, spec_for
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.slots import GraphSlot


class Coder:
    """The encoder and decoder of one rank.

    Args:
        seed: the seed of the noise.
        warmup_steps: the number of first exchanges of each gradient that are not encoded.
        threads: kernel threads; None is TensorFlow's number for one operation.
        device: the device that encodes and decodes, and holds the residuals.

    Attributes:
        operations: the module of operations.
        threads: the number of threads of one kernel.
        ledger: the record of the current step, see ``ops/ledger.h``.
    """

    def __init__(
        self, seed: int, warmup_steps: int, threads: int | None, device: str = HOST
    ) -> None:
        self.operations = operations()
        threads = threads or tf.config.threading.get_intra_op_parallelism_threads()
        self.threads = threads or len(os.sched_getaffinity(0))
        self.ledger = self.operations.hvdc_ledger(threads=self.threads)
        self.warmup_steps = warmup_steps
        self._seed = seed
        self._device = device

    def expect(self, graph: int, gradients: int) -> None:
        """Tells the ledger how many gradients of a graph come back in a step, as far as it is traced."""
        self.operations.hvdc_expect(self.ledger, graph, gradients)

    def lay_out(
        self,
        graph: int,
        bucket: GraphBucket,
        slots: Sequence[GraphSlot],
        layouts: Sequence[MessageLayout],
    ) -> None:
        """Tells the ledger where the payloads of a bucket's messages are.

        Args:
            graph: the number of the graph.
            bucket: the bucket.
            slots: the slots of its gradients in the next steps.
            layouts: the layout of the first message and, if ranks own parts, of a rank's averages.
        """
        sections = layouts[0].sections or [layouts[0].end]
        self.operations.hvdc_layout(
            self.ledger,
            graph,
            bucket.number,
            [slot.label for slot in slots],
            tf.constant(bucket.scale, tf.float64),
            tf.constant(sections, tf.int64),
            [self._table(slots, layout) for layout in layouts],
        )

    def submit(
        self,
        bucket: GraphBucket,
        member: int,
        gradient: tf.Tensor,
        begun: tf.Tensor,
        state: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Gives a gradient to its bucket.

        Args:
            bucket: the bucket of the gradient.
            member: the number of the gradient in the bucket.
            gradient: the gradient in the order of the bucket's layout.
            begun: the tensor on which all messages of the step depend.
            state: the tensors of :attr:`GraphSlot.handles`.

        Returns:
            The token that stands for the gradient, shape=(1,), float32.
        """
        return self.run("submit", bucket, gradient, begun, *state, member=member)

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
        run = getattr(self.operations, f"hvdc_{operation}")
        with tf.device(self._device):
            return run(*inputs, self.ledger, bucket=bucket.number, **attributes)

    def _table(self, slots: Sequence[GraphSlot], layout: MessageLayout) -> bytes:
        """The entries of a message, as the operations read them (``Table`` in ``ops/kernels.h``)."""
        entries = [
            Entry(
                piece.codec,
                piece.shape,
                slots[piece.member].route.feedback,
                NoiseKey(self._seed, piece.stream, slots[piece.member].index),
                piece.offset,
            )
            for piece in layout.pieces
        ]
        places = [(piece.member, 0 if layout.own else piece.begin) for piece in layout.pieces]
        return bytes(table_of(entries, places, spec_for))
