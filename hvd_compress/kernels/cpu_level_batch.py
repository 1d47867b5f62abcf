"""The CPU's batches of integer sums: one call for the norms, the levels or the sums of many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_compress.codecs.checks import check_threads
from hvd_compress.kernels.batch import check_places
from hvd_compress.kernels.cpu_arrays import TensorTable, check_lengths, pointer_to, size_of
from hvd_compress.kernels.cpu_library import load, spec_pointer
from hvd_compress.kernels.entries import Arrays, LevelEntry
from hvd_compress.kernels.native import KernelError


class CpuLevelBatch:
    """Encodes many tensors as integers that ranks add, and decodes the sums, with one call each.

    First, every rank computes its norms; ``encode`` and ``decode`` use the largest norms of all ranks.
    Arrays are NumPy's, or CPU tensors. The norms of all tensors are in one array and their words in
    another, at the positions that the entries state; anything between them is left unchanged. Every list
    has one item per entry, in the order of the entries.

    One call of ``norms`` or ``encode`` and one of ``decode`` may run at the same time.

    Args:
        entries: the tensors. The dtypes of their values may change from call to call.
        threads: the number of threads that a call may use.

    Raises:
        KernelError: the library was not built, belongs to another version, or has no kernels for a codec
            or a width of lanes.
        ValueError: norms or words overlap.
    """

    def __init__(self, entries: Sequence[LevelEntry], threads: int = 1) -> None:
        check_threads("CpuLevelBatch", threads)
        self.entries = tuple(entries)
        self.threads = threads
        self._library = load()
        for entry in self.entries:
            spec = spec_pointer(entry.codec, entry.shape)
            if spec is None or self._library.hvdc_level_words(spec, entry.bits) < 0:
                raise KernelError(
                    f"{entry.codec!r}: the native library has no lanes of {entry.bits} bits"
                )
        self.norm_count = check_places(
            "LevelEntry.norm_offset",
            1,
            [(entry.norm_offset, entry.norm_end) for entry in self.entries],
        )
        self.word_count = check_places(
            "LevelEntry.word_offset",
            1,
            [(entry.word_offset, entry.word_end) for entry in self.entries],
        )
        self._encoding, self._decoding = self._table(), self._table()

    def norms(self, values: Sequence[Any], residuals: Sequence[Any | None], norms: Any) -> None:
        """Writes the norms of ``values + alpha residual`` for every entry.

        Args:
            values: the gradients, not changed; shape=(n,) each, float32, float16 or bfloat16, contiguous.
            residuals: the residuals, not changed; shape=(n,) each, in the feedback's ``residual_dtype``,
                contiguous; None where feedback is off.
            norms: the result, +Inf where a bucket is not finite; shape=(norm_count or more,), float32,
                contiguous.
        """
        check_lengths(len(self.entries), values, residuals)
        table = self._encoding
        table.set_values("values", values)
        table.set_residuals(residuals, residuals)
        table.call(self._library.hvdc_level_norms_batch, self._norms(norms), self.threads)

    def encode(
        self,
        values: Sequence[Any],
        residuals: Sequence[Any | None],
        next_residuals: Sequence[Any | None],
        steps: Sequence[int],
        norms: Any,
        message: Any,
    ) -> None:
        """Writes the levels of ``values + alpha residual`` for every entry.

        Args:
            values: the same as in :meth:`norms`.
            residuals: the same as in :meth:`norms`; changed only if the next residual shares its memory.
            next_residuals: the arrays for the residuals after this encoding, like ``residuals``; each is
                either the same memory or does not overlap it. In buckets whose norm is Inf, the residual
                stays the same.
            steps: the steps of the entries' noise.
            norms: the norms that ranks agree on, not changed; shape=(norm_count or more,), float32,
                contiguous.
            message: the result; shape=(word_count or more,), int32, contiguous.
        """
        check_lengths(len(self.entries), values, residuals, next_residuals, steps)
        table = self._encoding
        table.set_values("values", values)
        table.set_residuals(residuals, next_residuals)
        table.set_steps(steps)
        arrays = self._norms(norms), self._words(message)
        table.call(self._library.hvdc_level_encode_batch, *arrays, self.threads)

    def decode(self, values: Sequence[Any], norms: Any, message: Any, scale: float = 1.0) -> None:
        """Computes ``values = (sum of levels * unit) * scale`` for every entry, then rounds to their dtype.

        Args:
            values: the result, NaN where a norm is Inf; shape=(n,) each, float32, float16 or bfloat16,
                contiguous.
            norms: the same as in :meth:`encode`.
            message: the sum of all ranks' words; shape=(word_count or more,), int32, contiguous.
            scale: the factor of the sums, rounded to float32.
        """
        check_lengths(len(self.entries), values)
        table = self._decoding
        table.set_values("values", values)
        arrays = self._norms(norms), self._words(message)
        table.call(self._library.hvdc_level_decode_batch, *arrays, scale, self.threads)

    def _norms(self, array: Any) -> int:
        return _pointer("norms", array, self.norm_count, "float32")

    def _words(self, array: Any) -> int:
        return _pointer("message", array, self.word_count, "int32")

    def _table(self) -> TensorTable:
        entries = self.entries
        arrays = Arrays.whole(entry.shape for entry in entries)
        return TensorTable(
            arrays.sizes,
            arrays.places,
            entries,
            [(4 * e.word_offset, 4 * (e.word_end - e.word_offset)) for e in entries],
            [entry.bits for entry in entries],
            [(entry.norm_offset, entry.norm_end - entry.norm_offset) for entry in entries],
        )


def _pointer(what: str, array: Any, least: int, dtype: str) -> int:
    size = size_of(array)
    if size < least:
        raise ValueError(f"{what}: expected at least {least} elements, got {size}")
    return pointer_to(what, array, size, dtype)
