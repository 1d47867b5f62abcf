"""The interface of all executors of the codecs, on any kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey


class Kernels(Protocol):
    """Encodes and decodes whole tensors.

    Each executor has its own kind of arrays (NumPy arrays for the reference, raw pointers with a dtype for
    the CPU library), but sizes, dtypes and meaning are the same everywhere, and so are the bytes.
    """

    name: str

    def encode(
        self,
        codec: Codec,
        shape: tuple[int, ...],
        gradient: Any,
        payload: Any,
        *,
        feedback: ErrorFeedback,
        residual: Any | None,
        noise: NoiseKey,
    ) -> None:
        """Writes the payload of ``gradient + alpha residual`` and updates the residual in place.

        Args:
            codec: the codec that encodes the tensor.
            shape: the tensor's shape.
            gradient: the gradient, row-major, not changed; shape=(n,), float32, float16 or bfloat16.
            payload: the result; shape=(codec.payload_bytes(shape),), uint8. If the size of payloads
                varies, the bytes behind the payload's length have no meaning.
            feedback: the error feedback coefficients; if they are not enabled, ``residual`` must be None.
            residual: the residual, in and out; shape=(n,), in ``feedback.residual_dtype``. Groups with a
                non-finite number keep their residual.
            noise: the tensor's position in the noise; the payload's header contains the step.
        """
        ...

    def decode_sum(
        self,
        codec: Codec,
        shape: tuple[int, ...],
        payloads: Any,
        out: Any,
        *,
        step: int,
        scale: float = 1.0,
    ) -> None:
        """Computes ``out = scale * (decode(payloads[0]) + decode(payloads[1]) + ...)``.

        The payloads are added in float32 and in that order, starting from +0; the sum is scaled and
        rounded to the dtype of ``out``.

        Args:
            codec: the codec that encoded every payload.
            shape: the tensor's shape.
            payloads: the payloads, shape=(k, codec.payload_bytes(shape)), uint8; there may be gaps between
                rows.
            out: the result, shape=(n,), float32, float16 or bfloat16.
            step: the step that every payload's header must contain.
            scale: the factor of the sum, rounded to float32.

        Raises:
            PayloadError: a payload is not one that this codec writes for this shape and step; ``out`` is
                then unspecified, but no other memory has been changed.
        """
        ...


Sender = Callable[[int, int], tuple[str, int]]
"""The name of a tensor and the rank that sent a payload, by the number of an entry and of a row."""


class KernelBatch(Protocol):
    """Encodes many tensors into one message, and decodes all ranks' messages, with one call each.

    The tensors, their codecs and their places in the message are fixed when a batch is made
    (:class:`hvd_compress.kernels.batch.Entry`), and so are their places in arrays
    (:class:`hvd_compress.kernels.batch.Arrays`). Every list has one item per array. Payloads, residuals
    and sums are equal to those of :class:`Kernels`, bit for bit.
    """

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Writes the payload of ``values + alpha residual`` for every entry.

        Args:
            values: the gradients, not changed; shape=(n,) each, float32, float16 or bfloat16, contiguous.
            residuals: the residuals, changed only if the next residual shares its memory; shape=(n,) each,
                in the feedback's ``residual_dtype``, contiguous; None where feedback is not enabled.
            next_residuals: the arrays for the residuals after this encoding, like ``residuals``; each is
                either the same memory or does not overlap it. In groups with a non-finite number, the
                residual stays the same.
            steps: the steps of the noise, which the payloads' headers contain.
            message: the message; shape=(bytes,), uint8, contiguous. Only the payloads are overwritten.
        """
        ...

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Computes ``values = scale * (sum over ranks of the decoded payloads)`` for every entry.

        Args:
            values: the result, shape=(n,) each, float32, float16 or bfloat16, contiguous.
            steps: the steps that the payloads' headers must contain.
            rows: one message per row, shape=(ranks, bytes), uint8; there may be gaps between rows.
            scale: the factor of the sums, rounded to float32.
            word: a word on the device, shape=(1,), int32, in and out. An executor that does not wait for
                its own work sets the lowest bit if any payload was encoded from an Inf or a NaN, or was
                altered; others leave the word as it is. None means that the caller does not need to know.

        Returns:
            Whether any payload was encoded from an Inf or a NaN. An executor that does not wait for its own
            work cannot know, and returns False.

        Raises:
            BatchPayloadError: a payload is not one that its codec writes for its shape and step;
                ``values`` are then unspecified.
        """
        ...

    def name_senders(self, sender: Sender) -> None:
        """Says who sends the payloads that are decoded from now on, for errors that are raised later.

        Args:
            sender: returns the tensor's name and the sender's rank for the number of an entry and of a row.
                The errors that :meth:`decode_sum` raises do not need it.
        """
        return
