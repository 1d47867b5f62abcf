"""Batches of tensors on a device whose codecs have kernels for CPUs only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_compress.kernels.batch import Arrays, Batch, Entry
from hvd_compress.kernels.cpu_arrays import check_lengths, check_message
from hvd_compress.kernels.cpu_batch import CpuBatch


class CopiedBatch(Batch):
    """Implements :class:`hvd_compress.kernels.batch.Batch` with copies in host memory.

    Every call waits for the device.

    Args:
        entries: the tensors.
        threads: the number of threads that a call may use.
        arrays: the places of the entries' values; None means one array for each entry.

    Raises:
        KernelError: the CPU's library was not built, or belongs to another version.
        ValueError: payloads overlap, or one does not start at a multiple of 4.
    """

    def __init__(
        self, entries: Sequence[Entry], threads: int = 1, arrays: Arrays | None = None
    ) -> None:
        self._copied = CpuBatch(entries, threads)
        self._arrays = arrays or self._copied.arrays

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes copies, and copies the results back; arguments and errors as in ``Batch.encode``."""
        check_lengths(len(self._arrays.sizes), values, residuals, next_residuals, steps)
        check_message("message", message.numel(), self._copied.message_bytes)
        given, before = (_on_host(self._parts(arrays)) for arrays in (values, residuals))
        after = self._parts(next_residuals)
        kept, written = _room(after), message.new_empty(message.shape, device="cpu")
        self._copied.encode(given, before, kept, self._steps(steps), written)
        _copy(kept, after)
        for entry in self._copied.entries:
            message[entry.offset : entry.end].copy_(written[entry.offset : entry.end])

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes copies, and copies the sums back; arguments and errors as in ``Batch.decode_sum``."""
        check_lengths(len(self._arrays.sizes), values, steps=steps)
        outs = self._parts(values)
        sums = _room(outs)
        nonfinite = self._copied.decode_sum(sums, self._steps(steps), rows.cpu(), scale)
        _copy(sums, outs)
        if word is None:
            return nonfinite
        word |= int(nonfinite)
        return False

    def _parts(self, arrays: Sequence[Any | None]) -> list[Any | None]:
        """Each entry's part of an array."""
        parts = []
        for entry, (number, begin) in zip(self._copied.entries, self._arrays.places, strict=True):
            array = arrays[number]
            end = begin + math.prod(entry.shape)
            parts.append(None if array is None else array[begin:end])
        return parts

    def _steps(self, steps: Sequence[int]) -> list[int]:
        return [steps[number] for number, _ in self._arrays.places]


def _on_host(parts: Sequence[Any | None]) -> list[Any | None]:
    return [None if part is None else part.cpu() for part in parts]


def _room(parts: Sequence[Any | None]) -> list[Any | None]:
    """Host memory for copies of tensors, not initialized."""
    return [None if part is None else part.new_empty(part.shape, device="cpu") for part in parts]


def _copy(sources: Sequence[Any | None], destinations: Sequence[Any | None]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        if destination is not None:
            destination.copy_(source)
