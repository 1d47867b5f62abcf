"""Plain casts, the baselines that every codec has to beat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base
from hvd_compress.codecs.noise import NoiseKey


@dataclass(frozen=True)
class _Cast(base.Codec):
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"
    _bytes: ClassVar[int]

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: no scales, only the numbers one after another."""
        whole = base.grouped_layout(shape, "tensor", lambda n: n * self._bytes)
        return dataclasses.replace(whole, scales=0)

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rounds every element to the nearest value, ties to even."""
        return np.empty(0, np.float32), self._cast(x).view(np.uint8)

    def native(self) -> dict[str, int | float]:
        """An empty dictionary: the codec's id is enough."""
        return {}

    def _cast(self, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision; every NaN is sent as 0x7e00."""

    codec_id: ClassVar[int] = 5
    name: ClassVar[str] = "fp16"
    _bytes: ClassVar[int] = 2

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Widens to float32, exactly."""
        return codes.view("<f2").astype(np.float32)

    def _cast(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            half = x.astype("<f2").view("<u2")
        return np.where(np.isnan(x), np.uint16(0x7E00), half)


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16, the upper half of a float32; every NaN is sent as 0x7fc0."""

    codec_id: ClassVar[int] = 6
    name: ClassVar[str] = "bf16"
    _bytes: ClassVar[int] = 2

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Widens to float32, exactly."""
        return (codes.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)

    def _cast(self, x: np.ndarray) -> np.ndarray:
        bits = x.view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype("<u2"))


@dataclass(frozen=True)
class NoCompression(_Cast):
    """Unchanged float32; every NaN is sent as 0x7fc00000."""

    codec_id: ClassVar[int] = 7
    name: ClassVar[str] = "none"
    _bytes: ClassVar[int] = 4

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Returns the numbers unchanged."""
        return codes.view("<f4").astype(np.float32)

    def _cast(self, x: np.ndarray) -> np.ndarray:
        bits = x.view(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FC00000), bits).astype("<u4")
