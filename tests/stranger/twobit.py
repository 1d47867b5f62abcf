"""A codec of two bits a number: -3/2, -1/2, 1/2 or 3/2 times the unit of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import Codec, NoiseKey, PayloadLayout
from hvd_compress.codecs.base import by_group, group_lengths, grouped_layout, spread
from hvd_compress.codecs.checks import check_group

LARGEST_UNIT = 2.0**127
"""With larger units, 3/2 of one would overflow."""


@dataclass(frozen=True)
class TwoBit(Codec):
    """The codec ``twobit``.

    Attributes:
        group: elements that share a unit.
    """

    group: int = 512

    codec_id: ClassVar[int] = 201
    name: ClassVar[str] = "twobit"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"

    def __post_init__(self) -> None:
        check_group("TwoBit", "group", self.group, ())

    def layout(self, shape: tuple[int, ...]) -> PayloadLayout:
        return grouped_layout(shape, self.group, lambda count: -(-count // 4))

    def quantize(
        self, x: np.ndarray, shape: tuple[int, ...], noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        groups = by_group(x.astype(np.float64), self.group)
        lengths = group_lengths(x.size, self.group)
        rms = np.sqrt((groups**2).sum(axis=1) / lengths)
        codes = np.nan_to_num(np.clip(np.floor(groups / rms[:, None]) + 2, 0, 3))
        # With the unit that fits best, the error is never larger than the group.
        levels = codes - 1.5
        levels[np.arange(levels.shape[1]) >= lengths[:, None]] = 0
        units = (groups * levels).sum(axis=1) / (levels**2).sum(axis=1)
        units = np.minimum(units, LARGEST_UNIT).astype(np.float32)
        units[~np.isfinite(groups).all(axis=1)] = np.nan
        codes = codes.reshape(-1)[: x.size].astype(np.uint8)
        four = np.zeros(-(-x.size // 4) * 4, np.uint8)
        four[: x.size] = codes
        packed = four.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)
        return units, np.bitwise_or.reduce(packed, axis=1)

    def dequantize(
        self, scales: np.ndarray, codes: np.ndarray, shape: tuple[int, ...]
    ) -> np.ndarray:
        count = self.layout(shape).count
        four = codes[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
        levels = four.reshape(-1)[:count].astype(np.float32) - np.float32(1.5)
        return levels * spread(scales, count, self.group)
