"""The operations that encode and decode, with a gradient's attributes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_compress.codecs import LevelCodec
from hvd_compress.tensorflow.native import spec_bytes
from hvd_compress.tensorflow.placement import HOST
from hvd_compress.tensorflow.slots import Slot

Parts = Sequence[tuple[int, int]]
"""The range [begin, end) of elements of each owner."""


@dataclass(eq=False)
class Encoded:
    """A gradient on its way.

    Attributes:
        slot: whose gradient.
        gradient: as it was given.
        step: its position in the noise, shape=(), int64.
        gathered: whether messages were exchanged, shape=(), bool.
        arrived: what came back, shape=(bytes,), uint8: payloads or, where not ``gathered``, the float32
            sum of the ranks' gradients.
    """

    slot: Slot
    gradient: tf.Tensor
    step: tf.Tensor
    gathered: tf.Tensor
    arrived: tf.Tensor


class Coder:
    """What one rank encodes and decodes with.

    Args:
        operations: the module of operations.
        ledger: the compressor's.
        seed: of the noise.
        warmup_steps: so many exchanges of a gradient at the start are not encoded.
        threads: kernel threads; None is TensorFlow's number for one operation.
        device: where it works, and residuals are.
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
        self._warmup_steps = warmup_steps
        self._threads = threads
        self._device = device

    @property
    def threads(self) -> int:
        """Of one kernel."""
        threads = self._threads or tf.config.threading.get_intra_op_parallelism_threads()
        return threads or len(os.sched_getaffinity(0))

    def encode(
        self,
        slot: Slot,
        gradient: tf.Tensor,
        begun: tf.Tensor,
        *,
        streams: Sequence[int],
        ranks: int,
        parts: Parts = (),
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """A gradient's payload, or those of its parts; moves the residual on.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape.
            begun: what the step's messages depend on.
            streams: the rank in the noise key of each payload.
            ranks: how many send theirs.
            parts: what is encoded as a tensor of its own; nothing for the whole gradient.

        Returns:
            The payloads, shape=(bytes,), uint8, and the position in the noise, shape=(), int64.
        """
        step = self._position(slot, gradient, begun)
        message = self._on_device(self._ops.hvdc_encode)(
            gradient,
            step,
            slot.residual.handle,
            self._ledger,
            seed=self._seed,
            streams=streams,
            ranks=ranks,
            **_cut(parts),
            **self._attributes(slot),
        )
        return message, step

    def parts(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor, *, parts: Parts, own: int
    ) -> tf.Tensor:
        """A gradient's parts as they are, in the order of their owners.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape.
            begun: what the step's messages depend on.
            parts: of each owner.
            own: how many elements this rank is to encode.

        Returns:
            The numbers, shape=(bytes,), uint8, empty where there are not as many as in the parts; and the
            position in the noise, shape=(), int64.
        """
        step = self._position(slot, gradient, begun)
        message = self._on_device(self._ops.hvdc_parts)(
            gradient,
            step,
            self._ledger,
            own=own,
            **_cut(parts),
            **self._attributes(slot),
        )
        return message, step

    def average(
        self,
        slot: Slot,
        parts: tf.Tensor,
        step: tf.Tensor,
        *,
        length: int,
        stream: int,
        ranks: int,
        distributed: int,
        kept: int,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        """The owner's work: the payload of the average of what ranks sent.

        Args:
            slot: whose gradient.
            parts: what each rank sent of this rank's part, one after the other, shape=(bytes,), uint8.
            step: the position in the noise.
            length: elements of the part.
            stream: the rank in the noise key of the average.
            ranks: how many there are.
            distributed: bytes that this rank has sent to all owners, to be counted.
            kept: those of them that it has sent to itself.
            dtype: of the numbers that were sent; None for payloads.

        Returns:
            shape=(bytes,), uint8.
        """
        average, kind = self._ops.hvdc_average, {}
        if dtype is not None:
            average, kind = self._ops.hvdc_average_numbers, {"T": dtype}
        return self._on_device(average)(
            parts,
            step,
            slot.owned.handle,
            self._ledger,
            seed=self._seed,
            length=length,
            stream=stream,
            ranks=ranks,
            distributed=distributed,
            kept=kept,
            **kind,
            **self._attributes(slot),
        )

    def decode(
        self,
        encoded: Encoded,
        reduced: tf.Tensor,
        *,
        ranks: int,
        scale: float,
        sum_scale: float,
        parts: Parts = (),
    ) -> tf.Tensor:
        """The result, in the shape and dtype of the gradient.

        Args:
            encoded: what came back, and of what.
            reduced: the token, when Horovod has reduced it.
            ranks: how many sent a payload of the whole gradient, or of each part.
            scale: the factor on the sum of payloads.
            sum_scale: the factor on the sum that went uncompressed.
            parts: where payloads of parts came instead.
        """
        return self._on_device(self._ops.hvdc_decode)(
            message=encoded.arrived,
            gathered=encoded.gathered,
            reduced=reduced,
            gradient=encoded.gradient,
            step=encoded.step,
            ledger=self._ledger,
            ranks=ranks,
            scale=scale,
            sum_scale=sum_scale,
            **_cut(parts),
            **self._attributes(encoded.slot),
        )

    def norms(
        self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor, *, bits: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """A gradient's norms, of which the ranks take the largest; the residual stays as it is.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape, which tracing knows.
            begun: what the step's messages depend on.
            bits: of a lane, wide enough for the sum of the ranks' levels.

        Returns:
            The norms, shape=(buckets,), float32, and the position in the noise, shape=(), int64.
        """
        step = self._position(slot, gradient, begun)
        message = self._on_device(self._ops.hvdc_norms)(
            gradient,
            step,
            slot.residual.handle,
            self._ledger,
            **self._level_attributes(slot, bits),
        )
        return message, step

    def levels(
        self,
        slot: Slot,
        gradient: tf.Tensor,
        norms: tf.Tensor,
        step: tf.Tensor,
        *,
        bits: int,
        stream: int,
    ) -> tf.Tensor:
        """A gradient's levels with these norms; moves the residual on.

        Args:
            slot: whose gradient.
            gradient: of the slot's shape.
            norms: the largest of all ranks.
            step: the position in the noise.
            bits: of a lane.
            stream: the rank in the noise key.

        Returns:
            shape=(words + 1,), int32: levels in lanes, and a 1 to count this rank by.
        """
        return self._on_device(self._ops.hvdc_levels)(
            gradient,
            norms,
            step,
            slot.residual.handle,
            self._ledger,
            seed=self._seed,
            stream=stream,
            **self._level_attributes(slot, bits),
        )

    def decode_levels(
        self, encoded: Encoded, reduced: tf.Tensor, *, bits: int, ranks: int, scale: float
    ) -> tf.Tensor:
        """The result of a sum of levels, in the shape and dtype of the gradient.

        Args:
            encoded: of what; what came back are the norms and the sum of the ranks' words, as bytes.
            reduced: the token, when Horovod has reduced it.
            bits: of a lane.
            ranks: how many sent their levels.
            scale: the factor on the sum of the ranks' gradients.
        """
        return self._on_device(self._ops.hvdc_decode_levels)(
            message=encoded.arrived,
            gathered=encoded.gathered,
            reduced=reduced,
            gradient=encoded.gradient,
            ledger=self._ledger,
            ranks=ranks,
            scale=scale,
            sum_scale=scale,
            **self._level_attributes(encoded.slot, bits),
        )

    def _position(self, slot: Slot, gradient: tf.Tensor, begun: tf.Tensor) -> tf.Tensor:
        # A gradient that never comes does not count as exchanged.
        with tf.control_dependencies([gradient]), tf.device(HOST):
            return self._ops.hvdc_position(begun, slot.exchanges.handle, warmup=self._warmup_steps)

    def _on_device(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def placed(*inputs: tf.Tensor, **rest: Any) -> Any:
            with tf.device(self._device):
                return operation(*inputs, **rest)

        return placed

    def _level_attributes(self, slot: Slot, bits: int) -> dict[str, Any]:
        codec = slot.route.codec
        assert isinstance(codec, LevelCodec) and slot.shape is not None
        layout = codec.layout(slot.shape)
        return {
            "count": layout.count,
            "buckets": layout.scales,
            "bits": bits,
            **self._attributes(slot),
        }

    def _attributes(self, slot: Slot) -> dict[str, Any]:
        return {
            "label": slot.label,
            "spec": spec_bytes(slot.route.codec),
            "tensor": slot.index,
            "threads": self.threads,
            "alpha": slot.route.feedback.alpha,
            "beta": slot.route.feedback.beta,
        }


def _cut(parts: Parts) -> dict[str, list[int]]:
    return {
        "begins": [begin for begin, _ in parts],
        "lengths": [end - begin for begin, end in parts],
    }
