"""The 8-bit data types of Dettmers, 2016, section 3.1, and the two of OCP FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base, checks
from hvd_compress.codecs.noise import NoiseKey

Kind = Literal["linear", "dynamic", "static", "mantissa", "e4m3", "e5m2"]

_KINDS = {"linear": 0, "dynamic": 1, "static": 2, "mantissa": 3, "e4m3": 4, "e5m2": 5}
_FIXED = ("static", "mantissa")
_LEVELS = np.float32(127)
_FLOATS = {"e4m3": (3, -17, 0x7E), "e5m2": (2, -31, 0x7B)}
"""Bits of mantissa, the exponent of the smallest step, and the code of the largest magnitude."""
_TOPS = {"linear": _LEVELS, **dict.fromkeys(_FLOATS, np.float32(1.75))}
_HALVES = ((2, 9), (9, 20))
"""The intervals after a tree's first cut, (0.1, 0.45) and (0.45, 1), in twentieths."""


@dataclass(frozen=True)
class Int8(base.Codec):
    """Eight bits per element: a sign and one of 128 magnitudes.

    Attributes:
        kind: ``"dynamic"`` tree, ``"linear"``, ``"static"`` tree or ``"mantissa"`` (figure 1), or a
            floating-point format of OCP FP8, ``"e4m3"`` or ``"e5m2"``.
        group: the number of contiguous elements that types other than ``"static"`` and ``"mantissa"``
            normalise by their absolute maximum, a multiple of 64, or ``"tensor"`` (the paper's choice).
        offset: the exponent offset of the ``"static"`` and ``"mantissa"`` types, which are not
            normalised: magnitudes are multiplied by ``10**offset`` (section 3.4 uses 1 and 2).
    """

    codec_id: ClassVar[int] = 2
    name: ClassVar[str] = "int8"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"

    kind: Kind = "dynamic"
    group: int | Literal["tensor"] = 2048
    offset: int = 1

    def __post_init__(self) -> None:
        checks.check_choice("Int8", "kind", self.kind, tuple(_KINDS))
        checks.check_group("Int8", "group", self.group)
        checks.check_number("Int8", "offset", self.offset, -20, 20, integer=True)
        checks.store(self, "offset", int(self.offset))

    @property
    def saturates(self) -> bool:
        """Whether there is a largest magnitude, about ``10**offset``, as no group is normalised."""
        return self.kind in _FIXED

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: one scale per group, then one byte per element."""
        return base.grouped_layout(shape, self.group, lambda n: n)

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Normalises by the group's scale, then rounds to the nearest magnitude."""
        largest = np.array([np.max(np.abs(g)) for g in base.groups_of(x, self.group)])
        finite = np.isfinite(largest)
        if self.saturates:
            kept = finite
            largest = np.full_like(largest, 10.0**self.offset)
        else:
            kept = finite & (largest >= base.TINY)
            largest = np.where(kept, largest, np.float32(1))
        top = _TOPS.get(self.kind, np.float32(1))
        inverse = np.where(kept, top / largest, np.float32(0))
        with np.errstate(invalid="ignore"):
            y = x * base.spread(inverse, x.size, self.group)
        y = np.where(base.spread(kept, x.size, self.group), y, np.float32(0))
        codes = _round_linear(y) if self.kind == "linear" else _round_to_table(y, self.kind)
        largest = np.where(kept, largest, np.float32(0)).astype(np.float32)
        scales = base.unit_of(largest, top)
        return np.where(finite, scales, np.float32(np.nan)).astype(np.float32), codes

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Multiplies each signed magnitude by the group's scale."""
        if self.kind == "linear":
            unit = codes.view(np.int8).astype(np.float32)
        else:
            magnitude = magnitudes(self.kind)[codes & 0x7F]
            unit = np.where(codes & 0x80, -magnitude, magnitude)
        return unit * base.spread(scales, codes.size, self.group)

    def native(self) -> dict[str, int | float]:
        """The C interface's ``variant``, ``grouping``, ``group`` and ``factor``."""
        return {
            "variant": _KINDS[self.kind],
            "factor": 10.0**self.offset,
            **base.native_grouping(self.group),
        }


def _round_linear(y: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(y), -_LEVELS, _LEVELS).astype(np.int8).view(np.uint8)


def _round_to_table(y: np.ndarray, kind: Kind) -> np.ndarray:
    codes, thresholds = _ladder(kind)
    nearest = codes[np.searchsorted(thresholds, np.abs(y), side="right")]
    return nearest | (np.signbit(y).astype(np.uint8) << 7)


@cache
def magnitudes(kind: Kind) -> np.ndarray:
    """The magnitude of each 7-bit code before scaling, shape=(128,), dtype float32.

    ``"mantissa"``: 3 bits of exponent ``e`` above 4 bits of mantissa ``m``, ``(m / 10) 10**-e``.
    ``"static"``: the same exponent above 4 bits of a tree.
    ``"dynamic"``: ``e`` zeros, a one, and the remaining ``6 - e`` bits of a tree. Two codes leave no
    bit for a tree: no bit set is 0, and the lowest bit alone is 1.
    ``"e4m3"``, ``"e5m2"``: the number of OCP FP8 over 2**8 or 2**15, so that the largest is 1.75;
    codes above it, which no encoder writes, are Inf and NaN.

    A tree cuts (0.1, 1) at 0.45, then halves the chosen interval for each further bit. Its bits name an
    interval, and stand for the middle of that interval. This agrees with the paper's examples (section
    3.1) and with the table that its author released (clusterNet, ``8bit_floats.hdf5``).
    """
    values = [_magnitude(kind, code) for code in range(128)]
    table = np.array(values, np.float64).astype(np.float32)
    table.setflags(write=False)
    return table


def _magnitude(kind: Any, code: int) -> float:
    if kind in _FLOATS:
        bits, low, top = _FLOATS[kind]
        if code > top:
            return math.inf if code == 0x7C else math.nan
        exponent, part = divmod(code, 1 << bits)
        return math.ldexp(part + ((exponent > 0) << bits), low + max(exponent - 1, 0))
    # Quotients of integers, so that there is nothing to round before the division.
    if kind == "dynamic":
        if code < 2:
            return float(code)
        bits = code.bit_length() - 1
        exponent, path = 6 - bits, code - (1 << bits)
    else:
        bits = 4
        exponent, path = divmod(code, 16)
        if kind == "mantissa":
            return path / 10 ** (exponent + 1)
    half, part = divmod(path, 1 << (bits - 1))
    low, high = _HALVES[half]
    middle = (low << bits) + (high - low) * (2 * part + 1)
    return middle / ((20 << bits) * 10**exponent)


@cache
def _ladder(kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """The codes in ascending order of magnitude, and the thresholds between neighbours.

    A threshold is the middle of two magnitudes, rounded to float32; a number at the threshold becomes
    the upper one, so where ``"e4m3"`` and ``"e5m2"`` round a tie down to an even code, the threshold is
    the next float. Among codes with the same magnitude, the largest is used, so that neighbouring
    magnitudes of ``"mantissa"`` have neighbouring codes.
    """
    table = magnitudes(kind)
    finite = table[np.isfinite(table)]
    values, from_last = np.unique(finite[::-1], return_index=True)
    codes = finite.size - 1 - from_last
    wide = values.astype(np.float64)
    thresholds = ((wide[:-1] + wide[1:]) / 2).astype(np.float32)
    if kind in _FLOATS:
        above = np.nextafter(thresholds, np.float32(np.inf))
        thresholds = np.where(codes[:-1] % 2 == 0, above, thresholds)
    return codes.astype(np.uint8), thresholds
