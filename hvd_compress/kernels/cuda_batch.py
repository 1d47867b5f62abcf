"""Batches of CUDA tensors: a few launches encode or decode many tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.kernels.batch import (
    Arrays,
    Batch,
    BatchPayloadError,
    Entry,
    Sender,
    message_end,
    misplaced,
)
from hvd_compress.kernels.cpu_arrays import FixedArrays, check_lengths, check_message
from hvd_compress.kernels.cuda import (
    MAX_PAYLOADS,
    CudaKernels,
    DeviceArrays,
    altered,
    spec_for,
)
from hvd_compress.kernels.cuda_library import Array, Queue, table_of
from hvd_compress.kernels.native import DTYPES, check_dtype

_ARRAY = np.dtype(Array)


class CudaBatch(Batch):
    """Implements :class:`hvd_compress.kernels.batch.Batch` for CUDA tensors.

    Tensors whose codecs have the same kernel share one launch, up to 120 arrays when encoding and 256 when
    decoding. What stays the same from call to call is copied to the device by the first call in each
    stream; a call in a CUDA graph must not be the first one, and the batch must outlive the graph.

    A call puts its work into the current stream of the tensors' device and returns. So ``decode_sum``
    cannot raise for an altered payload: the tensor's whole result becomes NaN, and
    :meth:`.cuda.CudaKernels.check` raises after the caller has synchronized.

    Args:
        kernels: the CUDA kernels.
        entries: the tensors, whose codecs must have CUDA kernels. The dtypes of their values may change
            from call to call.
        arrays: the places of the entries' values; None means one array for each entry.

    Raises:
        KernelError: a codec has no CUDA kernels.
        ValueError: payloads overlap, or one does not start at a multiple of 16.

    Attributes:
        entries: the tensors.
        arrays: the places of the entries' values.
        message_bytes: the end of the last payload in the message, in bytes.
    """

    def __init__(
        self, kernels: CudaKernels, entries: Sequence[Entry], arrays: Arrays | None = None
    ) -> None:
        self.entries = tuple(entries)
        self.arrays = arrays or Arrays.whole(entry.shape for entry in self.entries)
        self.message_bytes = message_end(self.entries, 16)
        self._sender: Sender | None = None
        self._kernels = kernels
        self._tag = kernels.register(self)
        self._native = table_of(self.entries, self.arrays.places, spec_for)
        self._used = sorted({array for array, _ in self.arrays.places})
        fed = {row.array for row in self._native if row.feedback}
        self._fed = sorted(fed)
        kept = {row.array: row.residual_dtype for row in self._native if row.feedback}
        if any(row.residual_dtype != kept[row.array] for row in self._native if row.feedback):
            raise ValueError("Arrays: expected residuals of one dtype in each array, got two")
        self._fed_dtypes = np.array([kept[number] for number in self._fed], np.int32)
        self._sizes = list(self.arrays.sizes)
        self._absent = [number not in fed for number in range(len(self._sizes))]
        self._table = np.zeros(len(self._sizes), _ARRAY)
        self._address = self._table.ctypes.data
        self._columns = {name: self._table[name] for name in _ARRAY.names or ()}
        self._plans: dict[tuple[int, int, int], _Plan] = {}

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        message: Any,
    ) -> None:
        """Encodes on the device; arguments and errors are those of ``Batch.encode``.

        ``message`` must be aligned to 16 bytes.
        """
        check_lengths(len(self.arrays.sizes), values, residuals, next_residuals, steps)
        devices = DeviceArrays(self._kernels.services.type, message)
        pointer = devices.pointer("message", message, message.numel(), "uint8")
        check_message("message", message.numel(), self.message_bytes)
        library = self._kernels.library
        with self._kernels.launching(devices.index) as stream:
            self._set_values(values, steps, devices)
            self._set_residuals("residual", residuals, devices)
            self._set_residuals("next_residual", next_residuals, devices)
            plan = self._plan(devices.index, stream, -1)
            queue = Queue(devices.index, 0, stream)
            status = library.hvdc_cuda_encode_batch(
                plan.handle,
                self._address,
                len(self._table),
                pointer,
                ctypes.byref(queue),
            )
            self._kernels.check_status(status, "encode")

    def decode_sum(
        self,
        values: Sequence[Any],
        steps: Sequence[int],
        rows: Any,
        scale: float = 1.0,
        word: Any | None = None,
    ) -> bool:
        """Decodes on the device; arguments are those of ``Batch.decode_sum``.

        ``rows`` must be aligned to 16 bytes, and the stride of its rows a multiple of 16.

        Returns:
            False: the payloads' flags go to ``word``.

        Raises:
            PayloadError: rows are too short; for altered payloads, ``CudaKernels.check`` raises what
                :meth:`explain` makes.
        """
        check_lengths(len(self.arrays.sizes), values, steps=steps)
        ranks, size = rows.shape
        check_message("rows", size, self.message_bytes)
        if ranks > MAX_PAYLOADS:
            raise ValueError(f"rows: expected at most {MAX_PAYLOADS} ranks, got {ranks}")
        devices = DeviceArrays(self._kernels.services.type, rows)
        pointer = devices.rows("rows", rows)
        flags = None if word is None else devices.pointer("word", word, 1, "int32")
        with self._kernels.launching(devices.index) as stream:
            self._set_values(values, steps, devices)
            plan = self._plan(devices.index, stream, ranks)
            queue = Queue(devices.index, 0, stream)
            status = self._kernels.library.hvdc_cuda_decode_batch(
                plan.handle,
                self._address,
                len(self._table),
                pointer,
                rows.stride(0) if ranks > 1 else 0,
                scale,
                flags,
                self._kernels.error_address(devices.index, stream),
                self._tag,
                ctypes.byref(queue),
            )
            self._kernels.check_status(status, "decode_sum")
        return False

    def name_senders(self, sender: Sender) -> None:
        """See ``Batch.name_senders``; ``sender`` is kept, and should not refer to tensors."""
        self._sender = sender

    def explain(self, number: int, row: int, what: str) -> BatchPayloadError:
        """Makes the error for an altered payload.

        Args:
            number: the number of the entry.
            row: the number of the row.
            what: the part of the payload that is wrong.
        """
        entry, name, rank = self.entries[number], "", row
        if self._sender is not None:
            name, rank = self._sender(number, row)
            name += ": "
        message = altered(rank, what, entry.codec, entry.shape)
        return BatchPayloadError(name + message, number, row)

    def _set_values(
        self, values: Sequence[Any], steps: Sequence[int], devices: DeviceArrays
    ) -> None:
        columns = self._columns
        pointers, dtypes, _ = devices.pointers("values", values, self._sizes)
        columns["values"][:], columns["dtype"][:] = pointers, dtypes
        columns["step"][:] = np.array(steps, np.uint64)

    def _set_residuals(
        self, column: str, given: Sequence[Any | None], devices: DeviceArrays
    ) -> None:
        what = f"{column}s"
        self._columns[column][:], dtypes, _ = devices.pointers(what, given, self._sizes)
        if isinstance(given, FixedArrays) and self._tag in given.fits:
            return
        absent = [one is None for one in given]
        for number in self._used if absent != self._absent else ():
            if absent[number] != self._absent[number]:
                raise misplaced(f"{what}[{number}]")
        if (dtypes[self._fed] != self._fed_dtypes).any():
            for number, dtype in zip(self._fed, self._fed_dtypes, strict=True):
                check_dtype(f"{what}[{number}]", given[number], tuple(DTYPES)[dtype])
        if isinstance(given, FixedArrays):
            given.fits.add(self._tag)

    def _plan(self, index: int, stream: int, ranks: int) -> _Plan:
        """The plan for calls in a stream: for the decoding of some ranks' messages; -1 means encoding."""
        key = index, stream, ranks
        if key not in self._plans:
            self._plans[key] = _Plan(self._kernels, self._native, index, stream, ranks)
        return self._plans[key]


class _Plan:
    """A plan of the library, and its memory on the device."""

    def __init__(
        self, kernels: CudaKernels, entries: Any, index: int, stream: int, ranks: int
    ) -> None:
        library, made = kernels.library, ctypes.c_void_p()
        arguments = (ctypes.byref(entries), len(entries))
        if ranks < 0:
            status = library.hvdc_cuda_plan_encode(*arguments, index, ctypes.byref(made))
        else:
            status = library.hvdc_cuda_plan_decode(*arguments, ranks, index, ctypes.byref(made))
        kernels.check_status(status, "batch")
        self.handle = made.value
        weakref.finalize(self, library.hvdc_cuda_plan_free, made.value)
        self._memory = kernels.services.empty(library.hvdc_cuda_plan_bytes(made), index)
        queue = ctypes.byref(Queue(index, 0, stream))
        status = library.hvdc_cuda_plan_prepare(made, self._memory.data_ptr(), queue)
        kernels.check_status(status, "batch")
