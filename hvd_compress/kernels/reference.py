"""The batch that NumPy computes: slow, short, and the definition for the other batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.codecs import BF16, Codec, ErrorFeedback, NoiseKey, PayloadError
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.payload import FLAG_NONFINITE, assemble, open_payload
from hvd_compress.kernels.batch import (
    Arrays,
    Batch,
    BatchPayloadError,
    Entry,
    message_end,
    misplaced,
)
from hvd_compress.kernels.cpu_arrays import (
    as_numpy,
    bits_of,
    check_lengths,
    check_message,
    is_bfloat16,
    readable,
    size_of,
)


class ReferenceBatch(Batch):
    """Implements :class:`hvd_compress.kernels.batch.Batch` for NumPy arrays and CPU tensors.

    NumPy lacks bfloat16: residuals that are kept in bfloat16 may be float32 arrays of such numbers.

    Args:
        entries: the tensors.
        arrays: the places of the entries' values; None means one array for each entry.

    Raises:
        ValueError: payloads overlap, or one does not start at a multiple of 4.
    """

    def __init__(self, entries: Sequence[Entry], arrays: Arrays | None = None) -> None:
        self.entries = tuple(entries)
        self.arrays = arrays or Arrays.whole(entry.shape for entry in self.entries)
        self.message_bytes = message_end(self.entries, 4)

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes one entry after the other; arguments and errors are those of ``Batch.encode``."""
        check_lengths(len(self.arrays.sizes), values, residuals, next_residuals, steps)
        check_message("message", size_of(message), self.message_bytes)
        payloads = as_numpy(message)
        for entry, (number, begin) in zip(self.entries, self.arrays.places, strict=True):
            part = slice(begin, begin + math.prod(entry.shape))
            noise = dataclasses.replace(entry.noise, step=steps[number])
            before, after = residuals[number], next_residuals[number]
            if {before is not None, after is not None} != {entry.feedback.enabled}:
                raise misplaced(f"residuals[{number}]")
            h = None if before is None else readable(before[part])
            with np.errstate(all="ignore"):
                g, x = compensated(readable(values[number][part]), entry.feedback, h)
                scales, codes = quantize(entry.codec, entry.shape, x, noise)
                payload = assemble(entry.codec, entry.shape, noise.step, scales, codes)
                payloads[entry.offset : entry.end] = payload
                if h is not None and after is not None:
                    decoded = dequantize(entry.codec, entry.shape, scales, codes)
                    kept = entry.feedback.carry(g, h, decoded, noise)
                    if is_bfloat16(after):
                        bits_of(after[part])[:] = kept.view(np.uint32) >> np.uint32(16)
                    else:
                        as_numpy(after)[part] = kept

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes entry by entry; arguments and errors are those of ``Batch.decode_sum``."""
        check_lengths(len(self.arrays.sizes), values, steps=steps)
        check_message("rows", rows.shape[1], self.message_bytes)
        nonfinite = False
        for place, entry in enumerate(self.entries):
            number, begin = self.arrays.places[place]
            total = np.zeros(math.prod(entry.shape), np.float32)
            with np.errstate(all="ignore"):
                for rank, row in enumerate(as_numpy(rows)):
                    flags, *content = opened(entry, steps[number], row, place, rank)
                    total += dequantize(entry.codec, entry.shape, *content)
                    nonfinite |= bool(flags & FLAG_NONFINITE)
                total *= np.float32(scale)
                out = values[number][begin : begin + total.size]
                if is_bfloat16(out):
                    _, codes = BF16().quantize(total, entry.shape, NoiseKey())
                    bits_of(out)[:] = codes.view(np.uint16)
                else:
                    as_numpy(out)[:] = total
        return nonfinite


def opened(
    entry: Entry, step: int, row: Any, number: int, rank: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """The flags, the scales and the codes of an entry's payload in a rank's message in host memory.

    Args:
        entry: the entry.
        step: the step that the payload's header must contain.
        row: the message, shape=(bytes,), uint8.
        number: the number of the entry, for errors.
        rank: the number of the row, for errors.

    Raises:
        BatchPayloadError: the payload is not one that the codec writes for the shape and the step.
    """
    try:
        payload = as_numpy(row)[entry.offset : entry.end]
        header, scales, codes = open_payload(entry.codec, entry.shape, step, payload)
    except PayloadError as error:
        raise BatchPayloadError(f"rank {rank}'s {error}", number, rank) from None
    return header.flags, scales, codes


def compensated(
    gradient: np.ndarray, feedback: ErrorFeedback, residual: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient in float32, and the values to encode: the gradient with the residual added."""
    g = gradient.astype(np.float32)
    return g, g if residual is None else feedback.compensate(g, residual)


def quantize(
    codec: Codec, shape: Shape, x: np.ndarray, noise: NoiseKey
) -> tuple[np.ndarray, np.ndarray]:
    """Calls :meth:`Codec.quantize`; an empty tensor has neither scales nor codes."""
    if not x.size:
        return np.empty(0, np.float32), np.empty(0, np.uint8)
    return codec.quantize(x, shape, noise)


def dequantize(codec: Codec, shape: Shape, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Calls :meth:`Codec.dequantize`; an empty tensor has no elements to decode."""
    if not math.prod(shape):
        return np.empty(0, np.float32)
    return codec.dequantize(scales, codes, shape)
