"""Batches: many tensors that one call encodes into one message, or decodes from all ranks' messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.feedback import OFF

_FIRST = NoiseKey()


@dataclass(frozen=True)
class Entry:
    """One tensor's place in a batch.

    Attributes:
        codec: the codec that encodes the tensor.
        shape: the tensor's shape; arrays are flat and row-major.
        feedback: the error feedback coefficients; if they are not enabled, there is no residual.
        noise: the seed, rank and tensor of the noise; the step is an argument of each call.
        offset: the offset of the payload in the message in bytes, a multiple of 4.
    """

    codec: Codec
    shape: Shape
    feedback: ErrorFeedback = OFF
    noise: NoiseKey = _FIRST
    offset: int = 0

    @property
    def end(self) -> int:
        """The offset of the payload's end in the message, in bytes."""
        return self.offset + self.codec.payload_bytes(self.shape)


@dataclass(frozen=True)
class Arrays:
    """The places of the entries' values and residuals in the arrays of a call.

    Attributes:
        sizes: the number of elements in each array.
        places: each entry's array, by number, and the entry's first element in this array.
    """

    sizes: Sequence[int]
    places: Sequence[tuple[int, int]]

    @classmethod
    def whole(cls, shapes: Iterable[Shape]) -> Arrays:
        """One whole array for each entry."""
        sizes = [math.prod(shape) for shape in shapes]
        return cls(sizes, [(number, 0) for number in range(len(sizes))])

    def of(self, numbers: Iterable[int]) -> Arrays:
        """The places of some of the entries, by number, in the same arrays."""
        return Arrays(self.sizes, [self.places[number] for number in numbers])


class BatchPayloadError(PayloadError):
    """A payload in a batch that no encoder with the entry's configuration can have written for its tensor.

    Attributes:
        entry: the number of the entry.
        rank: the number of the row with the payload.
    """

    def __init__(self, message: str, entry: int, rank: int) -> None:
        super().__init__(message)
        self.entry = entry
        self.rank = rank


Sender = Callable[[int, int], tuple[str, int]]
"""The name of a tensor and the rank that sent a payload, by the number of an entry and of a row."""


class Batch(Protocol):
    """Encodes tensors into one message, and decodes all ranks' messages, with one call each.

    The tensors, their codecs and their places in the message are fixed when a batch is made
    (:class:`Entry`), and so are their places in arrays (:class:`Arrays`). Every list has one item per
    array. Each implementation has its own kind of arrays (NumPy arrays, tensors on the CPU, tensors on a
    CUDA device); sizes, dtypes, meaning and bytes are the same everywhere.
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
            message: the message; shape=(bytes,), uint8, contiguous. Only the payloads are overwritten. If
                the size of payloads varies, the bytes behind a payload's length have no meaning.

        Raises:
            ValueError: a residual without feedback, or feedback without a residual; or the size, order,
                alignment or device of an array differs.
            TypeError: the dtype of an array differs.
            PayloadError: the message is too short.
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

        The payloads are added in float32 and in the order of the rows, starting from +0; the sum is scaled
        and rounded to the dtype of the values.

        Args:
            values: the result, shape=(n,) each, float32, float16 or bfloat16, contiguous.
            steps: the steps that the payloads' headers must contain.
            rows: one message per row, shape=(ranks, bytes), uint8; there may be gaps between rows.
            scale: the factor of the sums, rounded to float32.
            word: a word on the device, shape=(1,), int32, in and out. For tensors on a device, the lowest
                bit is set if any payload was encoded from an Inf or a NaN, or was altered; other batches
                leave the word as it is. None means that the caller does not need to know.

        Returns:
            Whether any payload was encoded from an Inf or a NaN. A batch that does not wait for its own
            work cannot know, and returns False.

        Raises:
            BatchPayloadError: a payload is not one that its codec writes for its shape and step;
                ``values`` are then unspecified, but no other memory has been changed.
        """
        ...

    def name_senders(self, sender: Sender) -> None:
        """Says who sends the payloads that are decoded from now on, for errors that are raised later.

        Args:
            sender: returns the tensor's name and the sender's rank for the number of an entry and of a row.
                The errors that :meth:`decode_sum` raises do not need it.
        """
        return


class SplitBatch(Batch):
    """Implements :class:`Batch` with batches of the same arrays.

    Args:
        parts: the batches, with the numbers that their entries have in the whole.
    """

    def __init__(self, *parts: tuple[Batch, Sequence[int]]) -> None:
        self._parts = parts

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes one part after the other; arguments and errors are those of :meth:`Batch.encode`."""
        for batch, _ in self._parts:
            batch.encode(values, residuals, next_residuals, steps, message)

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes part by part; arguments and errors are those of :meth:`Batch.decode_sum`."""
        nonfinite = False
        for batch, numbers in self._parts:
            try:
                nonfinite = batch.decode_sum(values, steps, rows, scale, word) or nonfinite
            except BatchPayloadError as error:
                error.entry = numbers[error.entry]
                raise
        return nonfinite

    def name_senders(self, sender: Sender) -> None:
        """Names the senders for every part, by the numbers of its own entries."""

        def renumbered(numbers: Sequence[int]) -> Sender:
            return lambda entry, row: sender(numbers[entry], row)

        for batch, numbers in self._parts:
            batch.name_senders(renumbered(numbers))


def message_end(entries: Sequence[Entry], multiple: int) -> int:
    """Checks that payloads do not overlap; returns the end of the last one, in bytes.

    Raises:
        ValueError: two payloads overlap, or one starts before 0 or not at a multiple of ``multiple``.
    """
    end = 0
    for first, last in sorted((entry.offset, entry.end) for entry in entries):
        if first < 0 or first % multiple:
            raise ValueError(
                f"Entry.offset: expected multiples of {multiple} from 0 on, got {first}"
            )
        if first < end:
            raise ValueError(
                f"Entry.offset: expected nothing before {end} to be used twice, got {first}"
            )
        end = last
    return end


def misplaced(what: str) -> ValueError:
    """The error for an array of residuals that is there without error feedback, or missing with it."""
    return ValueError(f"{what}: expected a residual exactly where error feedback is enabled")
