"""A batch made of any executor's calls, and one made of other batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_compress.codecs import Codec, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.payload import FLAG_NONFINITE, FLAGS_OFFSET, open_payload
from hvd_compress.kernels.cpu_arrays import as_numpy, check_lengths, check_message
from hvd_compress.kernels.entries import Arrays, Entry
from hvd_compress.kernels.interface import KernelBatch, Kernels, Sender


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


class SerialBatch(KernelBatch):
    """Implements :class:`hvd_compress.kernels.interface.KernelBatch` with one executor call after another.

    Args:
        kernels: the executor.
        entries: the tensors.
        arrays: the places of the entries' values; None means one array for each entry.

    Raises:
        ValueError: payloads overlap, or one does not start at a multiple of 4.
    """

    def __init__(
        self,
        kernels: Kernels,
        entries: Sequence[Entry],
        arrays: Arrays | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self.arrays = arrays or Arrays.whole(entry.shape for entry in self.entries)
        self.message_bytes = check_places(
            "Entry.offset", 4, [(entry.offset, entry.end) for entry in self.entries]
        )
        self._kernels = kernels

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes one entry after the other; arguments and errors are those of ``KernelBatch.encode``."""
        check_lengths(len(self.arrays.sizes), values, residuals, next_residuals, steps)
        check_message("message", message.shape[0], self.message_bytes)
        for entry, (number, begin) in zip(self.entries, self.arrays.places, strict=True):
            part = slice(begin, begin + math.prod(entry.shape))
            residual, next_residual = residuals[number], next_residuals[number]
            if (next_residual is None) != (residual is None):
                raise ValueError(
                    "encode: expected a next residual exactly where there is a residual"
                )
            rest = None
            if residual is not None and next_residual is not None:
                rest = next_residual[part]
                if next_residual is not residual:
                    rest[:] = residual[part]
            self._kernels.encode(
                entry.codec,
                entry.shape,
                values[number][part],
                message[entry.offset : entry.end],
                feedback=entry.feedback,
                residual=rest,
                noise=dataclasses.replace(entry.noise, step=steps[number]),
            )

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes entry by entry; arguments and errors are those of ``KernelBatch.decode_sum``."""
        check_lengths(len(self.arrays.sizes), values, steps=steps)
        check_message("rows", rows.shape[1], self.message_bytes)
        nonfinite = False
        for place, entry in enumerate(self.entries):
            number, begin = self.arrays.places[place]
            out, step = values[number][begin : begin + math.prod(entry.shape)], steps[number]
            payloads = rows[:, entry.offset : entry.end]
            try:
                self._kernels.decode_sum(
                    entry.codec, entry.shape, payloads, out, step=step, scale=scale
                )
            except PayloadError as error:
                raise _named(error, entry, place, step, payloads) from None
            if word is not None:
                word |= (payloads[:, FLAGS_OFFSET] & FLAG_NONFINITE).max()
            elif on_host(payloads):
                flags = as_numpy(payloads)[:, FLAGS_OFFSET] & FLAG_NONFINITE
                nonfinite = nonfinite or bool(flags.any())
        return nonfinite


class SplitBatch(KernelBatch):
    """Implements :class:`hvd_compress.kernels.interface.KernelBatch` with batches of the same arrays.

    Args:
        parts: the batches, with the numbers that their entries have in the whole.
    """

    def __init__(self, *parts: tuple[KernelBatch, Sequence[int]]) -> None:
        self._parts = parts

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes one part after the other; arguments and errors are those of ``KernelBatch.encode``."""
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
        """Decodes part by part; arguments and errors are those of ``KernelBatch.decode_sum``."""
        nonfinite = False
        for batch, numbers in self._parts:
            try:
                nonfinite = batch.decode_sum(values, steps, rows, scale, word) or nonfinite
            except BatchPayloadError as error:
                error.entry = numbers[error.entry]
                raise
        return nonfinite

    def name_senders(self, sender: Sender) -> None:
        """See ``KernelBatch.name_senders``."""

        def renumbered(numbers: Sequence[int]) -> Sender:
            return lambda entry, row: sender(numbers[entry], row)

        for batch, numbers in self._parts:
            batch.name_senders(renumbered(numbers))


def altered_payload(
    codec: Codec, shape: Shape, step: int, rank: int, payload: Any, entry: int = 0
) -> BatchPayloadError | None:
    """The error that the reference finds in a rank's payload in host memory; None if there is none."""
    try:
        open_payload(codec, shape, step, as_numpy(payload).copy())
    except PayloadError as error:
        return BatchPayloadError(f"rank {rank}'s {error}", entry, rank)
    return None


def check_places(what: str, multiple: int, places: Iterable[tuple[int, int]]) -> int:
    """Checks that ranges do not overlap; returns the end of the last one.

    Raises:
        ValueError: two ranges overlap, or one starts before 0 or not at a multiple of ``multiple``.
    """
    end = 0
    for first, last in sorted(places):
        if first < 0 or first % multiple:
            raise ValueError(f"{what}: expected multiples of {multiple} from 0 on, got {first}")
        if first < end:
            raise ValueError(f"{what}: expected nothing before {end} to be used twice, got {first}")
        end = last
    return end


def on_host(array: Any) -> bool:
    """Whether the CPU can read an array's memory."""
    return not hasattr(array, "data_ptr") or array.device.type == "cpu"


def _named(
    error: PayloadError, entry: Entry, number: int, step: int, payloads: Any
) -> PayloadError:
    """The same error with the entry and the rank."""
    # An executor that raises for payloads on a device has waited for them, and decoded a copy.
    for rank, payload in enumerate(payloads if on_host(payloads) else payloads.cpu()):
        found = altered_payload(entry.codec, entry.shape, step, rank, payload, number)
        if found is not None:
            return found
    return error
