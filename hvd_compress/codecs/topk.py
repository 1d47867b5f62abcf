"""Sparsification: the largest elements of each chunk (Aji and Heafield, 2017; Sarfi et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base, checks
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.noise import NoiseKey

FLOAT_BITS = 32
"""The ``bits`` that send values as float32."""

_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class TopK(base.Codec):
    """The ``keep`` elements of each chunk with the largest magnitudes; all others are zeros.

    An element costs the bits of its index within the chunk, and ``bits`` for its value. A short last chunk
    keeps its share of elements, rounded up. Payloads have a fixed length. The other elements wait in the
    residual, so that the codec needs error feedback. With few exchanges between many local steps, as in
    DiLoCo, a decay (``ErrorFeedback(0.95, 0.95)``) forgets what is out of date (Sarfi et al., 2025).

    A value is a sign and one of ``2**(bits - 1)`` magnitudes: multiples 1, 2, 3, ... of the chunk's unit,
    the least-squares fit to the kept magnitudes, so that the error is never larger than the tensor.

    Attributes:
        chunk: the number of contiguous elements in a chunk, a multiple of 64 up to 65,536.
        keep: the number of elements that a full chunk sends.
        bits: the number of bits in a value, 1 to 8, or 32 for float32.
    """

    codec_id: ClassVar[int] = 8
    name: ClassVar[str] = "topk"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"
    feedback: ClassVar[ErrorFeedback] = ErrorFeedback(1.0, 1.0)

    chunk: int = 4096
    keep: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        checks.check_group("TopK", "chunk", self.chunk, ())
        checks.check_number("TopK", "keep", self.keep, 1, self.chunk, integer=True)
        checks.check_number("TopK", "bits", self.bits, 1, FLOAT_BITS, integer=True)
        if 8 < self.bits < FLOAT_BITS:
            raise ValueError(f"TopK.bits: expected 1 to 8, or {FLOAT_BITS}, got {self.bits}")
        for field in ("chunk", "keep", "bits"):
            checks.store(self, field, int(getattr(self, field)))

    @property
    def entry_bits(self) -> int:
        """The number of bits in an index and a value."""
        return (self.chunk - 1).bit_length() + self.bits

    def kept(self, count: int) -> int:
        """The number of elements that a chunk of ``count`` elements sends."""
        return -(-self.keep * count // self.chunk)

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: one unit per chunk, then the entries of each chunk, padded to 4 bytes."""
        return base.grouped_layout(shape, self.chunk, self._entry_bytes)

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keeps the largest magnitudes, of equal ones the first, in the order of their indices.

        Zeros are not sent: entries that are left over are 0.
        """
        units, codes = [], []
        for rows in _chunks(x, self.chunk):
            largest = np.max(np.abs(rows), axis=1)
            finite = np.isfinite(largest)
            sent = finite & (largest >= (base.TINY if self.bits < FLOAT_BITS else 0))
            rows = np.where(sent[:, None], rows, np.float32(0))
            # Magnitudes are ordered like their bits, and the complement puts the largest first.
            order = np.argsort(~np.abs(rows).view(np.uint32), axis=1, kind="stable")
            index = order[:, : self.kept(rows.shape[1])]
            used = np.take_along_axis(rows, index, axis=1) != 0
            index = np.sort(np.where(used, index, self.chunk), axis=1)
            used = index < self.chunk
            index[~used] = 0
            kept = np.where(used, np.take_along_axis(rows, index, axis=1), np.float32(0))
            unit, values = self._values(kept, largest, used)
            units.append(np.where(finite, np.where(sent, unit, 0), np.nan).astype(np.float32))
            entries = index.astype(np.uint64) | values << np.uint64(self.entry_bits - self.bits)
            codes.append(self._pack(entries))
        return np.concatenate(units), np.concatenate(codes)

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Multiplies each multiple by the chunk's unit; a chunk whose unit is NaN is NaN as a whole."""
        out = np.zeros(math.prod(shape), np.float32)
        chunk = 0
        entries = self._entries(codes, out.size)
        for rows, (_, index, values, used) in zip(_chunks(out, self.chunk), entries, strict=True):
            unit = scales[chunk : chunk + len(rows), None]
            row, entry = np.nonzero(used)
            rows[row, index[row, entry]] = self._numbers(values, unit)[row, entry]
            rows[np.isnan(unit[:, 0])] = np.nan
            chunk += len(rows)
        return out

    def check_codes(self, codes: np.ndarray, shape: base.Shape) -> None:
        """Raises ``PayloadError`` unless the indices of each chunk ascend, and lie in the chunk."""
        for length, index, _, used in self._entries(codes, math.prod(shape)):
            ascend = (np.diff(index, axis=1) > 0) & used[:, :-1]
            if (~ascend & used[:, 1:]).any() or (index >= length).any():
                raise base.PayloadError(
                    f"payload: expected ascending indices below {length} in every chunk, got others"
                )

    def native(self) -> dict[str, int | float]:
        """The C interface's ``variant``, ``grouping``, ``group`` and ``levels``."""
        return {"variant": self.bits, "levels": self.keep, **base.native_grouping(self.chunk)}

    def _values(
        self, kept: np.ndarray, largest: np.ndarray, used: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The chunks' units and the values' bits, for the entries of each chunk that are used."""
        if self.bits == FLOAT_BITS:
            return np.ones_like(largest), kept.view(np.uint32).astype(np.uint64)
        top = np.float32(1 << (self.bits - 1))
        magnitudes = np.abs(kept)
        count = used.sum(axis=1)
        mean = _sum(magnitudes.astype(np.float64)) / (count * max(1.0, float(top) / 2))
        tries = []
        for first in (largest / top, mean.astype(np.float32)):
            multiples = np.rint(np.clip(magnitudes / first[:, None], np.float32(1), top))
            multiples = np.where(used, multiples, np.float32(0)).astype(np.int64)
            products = _sum(magnitudes.astype(np.float64) * multiples)
            squares = (multiples**2).sum(axis=1)
            tries.append((products * products / squares, products / squares, multiples))
        second = tries[1][0] > tries[0][0]
        fit = np.where(second, tries[1][1], tries[0][1])
        multiples = np.where(second[:, None], tries[1][2], tries[0][2])
        sign = np.signbit(kept).astype(np.uint64) << np.uint64(self.bits - 1)
        values = sign | np.maximum(multiples - 1, 0).astype(np.uint64)
        return np.minimum(fit.astype(np.float32), _LARGEST / top), np.where(used, values, 0)

    def _numbers(self, values: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """The inverse of :meth:`_values`."""
        if self.bits == FLOAT_BITS:
            return values.astype(np.uint32).view(np.float32)
        half = np.uint64(1 << (self.bits - 1))
        magnitudes = ((values & (half - np.uint64(1))) + np.uint64(1)).astype(np.float32) * unit
        return np.where(values & half, -magnitudes, magnitudes)

    def _entry_bytes(self, count: int) -> int:
        return base.round_up(-(-self.kept(count) * self.entry_bits // 8), 4)

    def _pack(self, entries: np.ndarray) -> np.ndarray:
        """The entries of each chunk one behind the other, the least significant bit first."""
        number, kept = entries.shape
        bits = entries[..., None] >> np.arange(self.entry_bits, dtype=np.uint64) & np.uint64(1)
        size = base.round_up(-(-kept * self.entry_bits // 8), 4)
        padded = np.zeros((number, 8 * size), np.uint8)
        padded[:, : kept * self.entry_bits] = bits.reshape(number, -1)
        return np.packbits(padded, bitorder="little")

    def _entries(
        self, packed: np.ndarray, count: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """The length, indices, values and use of entries: of all full chunks, then of a short one."""
        weights = np.uint64(1) << np.arange(self.entry_bits, dtype=np.uint64)
        index_bits = self.entry_bits - self.bits
        for number, length in ((count // self.chunk, self.chunk), (1, count % self.chunk)):
            if not number * length:
                continue
            kept, size = self.kept(length), number * self._entry_bytes(length)
            plain = np.unpackbits(packed[:size], bitorder="little").reshape(number, -1)
            bits = plain[:, : kept * self.entry_bits].reshape(number, kept, self.entry_bits)
            entries = (bits * weights).sum(axis=2, dtype=np.uint64)
            used = entries != 0
            used[:, 0] = True
            index = (entries & np.uint64((1 << index_bits) - 1)).astype(np.int64)
            yield length, index, entries >> np.uint64(index_bits), used
            packed = packed[size:]


def _sum(rows: np.ndarray) -> np.ndarray:
    """The sum of each row in the order that the format prescribes: one number after the other."""
    total: np.ndarray = np.add.accumulate(rows, axis=1)[:, -1]
    return total


def _chunks(x: np.ndarray, size: int) -> list[np.ndarray]:
    """Views of the full chunks as one matrix, and of the short last chunk as another."""
    full = x.size // size * size
    views = (x[:full].reshape(-1, size), x[full:].reshape(1, -1))
    return [view for view in views if view.size]
