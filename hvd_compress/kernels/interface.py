"""What every executor of the codecs can do, whatever it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hvd_compress.codecs import Codec, ErrorFeedback, LevelCodec, NoiseKey


class Kernels(Protocol):
    """Encodes and decodes whole tensors.

    Arrays are the executor's own kind (NumPy arrays for the reference, raw pointers with a dtype for the
    CPU library), but sizes, dtypes and meaning are the same everywhere, and so are the bytes.
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
            codec: what to encode with.
            shape: the tensor's shape.
            gradient: shape=(n,), float32, float16 or bfloat16, row-major. Not changed.
            payload: shape=(codec.payload_bytes(shape),), uint8, overwritten. What stands behind the length
                of a payload whose size varies has no meaning.
            feedback: coefficients; where it is not enabled, ``residual`` must be None.
            residual: shape=(n,), float32, in and out; groups with a non-finite number keep theirs.
            noise: the tensor's position in the noise; its step is stamped on the payload.
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
        accumulate: bool = False,
    ) -> None:
        """``out = [out +] scale * (decode(payloads[0]) + decode(payloads[1]) + ...)``.

        Added in float32 and in that order, starting from +0, then scaled, then added to ``out`` where
        ``accumulate``, then rounded to the type of ``out``.

        Args:
            codec: what every payload was encoded with.
            shape: the tensor's shape.
            payloads: shape=(k, codec.payload_bytes(shape)), uint8; rows need not adjoin.
            out: shape=(n,), float32, float16 or bfloat16.
            step: the step that must be stamped on every payload.
            scale: factor on the sum, rounded to float32.
            accumulate: add to what ``out`` holds.

        Raises:
            PayloadError: a payload is not what this codec writes for this shape and step; ``out`` is
                then unspecified, but nothing outside it has been touched.
        """
        ...


class Batch(Protocol):
    """Encodes many tensors into one message, and decodes all ranks' messages, by one call each.

    The tensors, their codecs and their places in the message are fixed when a batch is made
    (:class:`hvd_compress.kernels.batch.Entry`), and so is what part of which array each of them is
    (:class:`hvd_compress.kernels.batch.Arrays`). Every list has one item an array. Payloads, residuals and
    sums are those of :class:`Kernels`, bit for bit.
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
            values: shape=(n,) each, float32, float16 or bfloat16, contiguous. Not changed.
            residuals: shape=(n,) each, float32, contiguous; None where feedback is not enabled. Not
                changed, but where the next residual is the same memory.
            next_residuals: where the residuals after this encoding go, like ``residuals``: for each array
                the same memory, or none of it. Groups with a non-finite number get the residual that they
                had.
            steps: stamped on the payloads, and part of the noise.
            message: shape=(bytes,), uint8, contiguous. Payloads are overwritten, other bytes stay.
        """
        ...

    def decode_sum(
        self, values: Sequence[Any], steps: Sequence[int], rows: Any, scale: float = 1.0
    ) -> bool:
        """``values = scale * (sum over ranks of what the payload decodes to)`` for every entry.

        Args:
            values: shape=(n,) each, float32, float16 or bfloat16, contiguous; overwritten.
            steps: what must be stamped on the payloads.
            rows: shape=(ranks, bytes), uint8, a message each; rows need not adjoin.
            scale: factor on the sums, rounded to float32.

        Returns:
            Whether some payload was encoded from an Inf or a NaN. An executor that has not waited for its
            own work cannot know, and returns False: its caller reads the payloads' flags on the device.

        Raises:
            BatchPayloadError: a payload is not what its codec writes for its shape and step; ``values``
                are then unspecified.
        """
        ...


class LevelKernels(Protocol):
    """Encodes whole tensors as integers that ranks add, and decodes the sums.

    First every rank takes its norms; the largest of all ranks' are given to everything that follows.
    Levels are packed in lanes of ``bits`` bits, which have to hold the levels' sum
    (:func:`hvd_compress.codecs.packing.lane_bits`). Arrays are the executor's own kind, as in
    :class:`Kernels`.
    """

    name: str

    def norms(
        self,
        codec: LevelCodec,
        shape: tuple[int, ...],
        gradient: Any,
        norms: Any,
        *,
        feedback: ErrorFeedback,
        residual: Any | None,
    ) -> None:
        """Writes the norms of ``gradient + alpha residual``.

        Args:
            codec: what to encode with.
            shape: the tensor's shape.
            gradient: shape=(n,), float32, float16 or bfloat16, row-major. Not changed.
            norms: shape=(codec.layout(shape).scales,), float32, overwritten; +Inf where not finite.
            feedback: coefficients; where it is not enabled, ``residual`` must be None.
            residual: shape=(n,), float32. Not changed.
        """
        ...

    def encode(
        self,
        codec: LevelCodec,
        shape: tuple[int, ...],
        gradient: Any,
        norms: Any,
        words: Any,
        *,
        bits: int,
        feedback: ErrorFeedback,
        residual: Any | None,
        noise: NoiseKey,
    ) -> None:
        """Writes the levels of ``gradient + alpha residual`` and updates the residual in place.

        Args:
            codec: what to encode with.
            shape: the tensor's shape.
            gradient: as in :meth:`norms`.
            norms: shape=(codec.layout(shape).scales,), float32. Not changed.
            words: shape=(codec.level_words(shape, bits),), int32, overwritten.
            bits: of a lane, 2 to 16.
            feedback: coefficients.
            residual: shape=(n,), float32, in and out; buckets whose norm is Inf keep theirs.
            noise: the tensor's position in the noise.
        """
        ...

    def decode(
        self,
        codec: LevelCodec,
        shape: tuple[int, ...],
        norms: Any,
        words: Any,
        out: Any,
        *,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """``out = (sum of levels * unit) * scale``, in float32, rounded to the type of ``out`` last.

        Args:
            codec: what the words were encoded with.
            shape: the tensor's shape.
            norms: as for :meth:`encode`.
            words: the sum of all ranks' words.
            out: shape=(n,), float32, float16 or bfloat16; NaN in buckets whose norm is Inf.
            bits: as for :meth:`encode`.
            scale: factor on the sum, rounded to float32.
        """
        ...
