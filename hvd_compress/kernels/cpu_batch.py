"""The CPU's batches: one call of the native library encodes or decodes many tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from hvd_compress.codecs.checks import check_threads
from hvd_compress.kernels.batch import (
    Arrays,
    Batch,
    BatchPayloadError,
    Entry,
    message_end,
)
from hvd_compress.kernels.cpu_arrays import (
    TensorTable,
    check_lengths,
    check_message,
    pointer_to,
    size_of,
)
from hvd_compress.kernels.cpu_arrays import rows as rows_of
from hvd_compress.kernels.cpu_library import load
from hvd_compress.kernels.native import spec_of
from hvd_compress.kernels.reference import ReferenceBatch, opened


class CpuBatch(Batch):
    """Implements :class:`hvd_compress.kernels.batch.Batch` for NumPy arrays and CPU tensors.

    The library's threads share the work of all tensors. The GIL is released while they run. Codecs
    without native kernels run in the reference, entry by entry, after the others.

    One ``encode`` and one ``decode_sum`` may run at the same time, but not two calls of either.

    Args:
        entries: the tensors. The dtypes of their values may change from call to call.
        threads: the number of threads that a call may use.
        arrays: the places of the entries' values; None means one array for each entry.

    Raises:
        KernelError: the library was not built, or belongs to another version.
        ValueError: payloads overlap, or one does not start at a multiple of 4.
    """

    def __init__(
        self, entries: Sequence[Entry], threads: int = 1, arrays: Arrays | None = None
    ) -> None:
        check_threads("CpuBatch", threads)
        self.entries = tuple(entries)
        self.threads = threads
        self.arrays = arrays or Arrays.whole(entry.shape for entry in self.entries)
        self.message_bytes = message_end(self.entries, 4)
        self._library = load()
        native = [spec_of(entry.codec, entry.shape) is not None for entry in self.entries]
        self._native = [number for number, yes in enumerate(native) if yes]
        self._others = [number for number, yes in enumerate(native) if not yes]
        self._encoding, self._decoding = self._table(), self._table()
        self._rest = ReferenceBatch(
            [self.entries[number] for number in self._others], self.arrays.of(self._others)
        )

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes on the CPU; arguments are those of ``Batch.encode``."""
        check_lengths(len(self.arrays.sizes), values, residuals, next_residuals, steps)
        size = size_of(message)
        check_message("message", size, self.message_bytes)
        pointer = pointer_to("message", message, size, "uint8")
        table = self._encoding
        table.set_values("values", values)
        table.set_residuals(residuals, next_residuals)
        table.set_steps(steps)
        table.call(self._library.hvdc_encode_batch, pointer, self.threads)
        if self._others:
            self._rest.encode(values, residuals, next_residuals, steps, message)

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes on the CPU; arguments and errors are those of ``Batch.decode_sum``."""
        check_lengths(len(self.arrays.sizes), values, steps=steps)
        ranks, size = rows.shape
        check_message("rows", size, self.message_bytes)
        pointer, stride = rows_of("rows", rows)
        table = self._decoding
        table.set_values("values", values)
        table.set_steps(steps)
        bad, rank = ctypes.c_int64(-1), ctypes.c_int32(-1)
        status = self._library.hvdc_decode_batch(
            table.pointer,
            table.size,
            pointer,
            stride,
            ranks,
            scale,
            self.threads,
            ctypes.byref(bad),
            ctypes.byref(rank),
        )
        if status and rank.value >= 0:
            # The reference's checks name the field and both values; the library only finds the payload.
            number = self._native[bad.value]
            step = steps[self.arrays.places[number][0]]
            opened(self.entries[number], step, rows[rank.value], number, rank.value)
        if status:
            raise table.refusal(status, bad.value)
        nonfinite = table.any_flag()
        if self._others:
            try:
                nonfinite = self._rest.decode_sum(values, steps, rows, scale) or nonfinite
            except BatchPayloadError as error:
                error.entry = self._others[error.entry]
                raise
        return nonfinite

    def _table(self) -> TensorTable:
        entries = [self.entries[number] for number in self._native]
        return TensorTable(
            self.arrays.sizes,
            [self.arrays.places[number] for number in self._native],
            entries,
            [(entry.offset, entry.end - entry.offset) for entry in entries],
        )
