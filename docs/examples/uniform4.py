"""A codec to compare with others: ``python -m benchmarks.compare docs/examples/uniform4.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey, PayloadLayout
from hvd_compress.codecs.base import TINY, by_group, grouped_layout, spread, unit_of
from hvd_compress.codecs.checks import check_group
from hvd_compress.codecs.packing import pack_planes, plane_bytes, unpack_planes

LEVELS = 7
"""The largest level; the codes of -7 to 7 are 0 to 14."""


@dataclass(frozen=True)
class Uniform4(Codec):
    """Four bits an element: the nearest of 15 evenly spaced levels, with error feedback.

    Attributes:
        group: the number of elements that share a scale, a multiple of 64.
    """

    group: int = 512

    codec_id: ClassVar[int] = 210
    name: ClassVar[str] = "uniform4"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"
    feedback: ClassVar[ErrorFeedback] = ErrorFeedback(alpha=1.0, beta=1.0)

    def __post_init__(self) -> None:
        check_group("Uniform4", "group", self.group, ())

    def layout(self, shape: tuple[int, ...]) -> PayloadLayout:
        return grouped_layout(shape, self.group, lambda count: plane_bytes(count, 4))

    def quantize(
        self, x: np.ndarray, shape: tuple[int, ...], noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        groups = by_group(x, self.group)
        largest = np.abs(groups).max(axis=1)
        units = unit_of(np.where(np.isfinite(largest), largest, np.nan), np.float32(LEVELS))
        units[units < TINY] = 0  # A group of zeros, or of numbers too small for a reciprocal.
        with np.errstate(invalid="ignore", divide="ignore"):
            levels = np.rint(groups / units[:, None])
        levels[~(units > 0)] = 0
        codes = (np.clip(levels, -LEVELS, LEVELS) + LEVELS).astype(np.uint8)
        return units, pack_planes(codes.reshape(-1)[: x.size], 4)

    def dequantize(
        self, scales: np.ndarray, codes: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        count = self.layout(shape).count
        levels = unpack_planes(codes, count, 4).astype(np.float32) - np.float32(LEVELS)
        return levels * spread(scales, count, self.group)
