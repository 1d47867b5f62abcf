"""Plain casts, the baselines that every codec has to beat."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base, bfloat, checks
from hvd_compress.codecs.noise import NoiseKey, uniform


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
        """Rounds every element, as the codec's class says."""
        return np.empty(0, np.float32), self._cast(x, noise).view(np.uint8)

    def native(self) -> dict[str, int | float]:
        """An empty dictionary: the codec's id is enough."""
        return {}

    def _cast(self, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision, rounded to nearest, ties to even; every NaN is sent as 0x7e00."""

    codec_id: ClassVar[int] = 5
    name: ClassVar[str] = "fp16"
    _bytes: ClassVar[int] = 2

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Widens to float32, exactly."""
        return codes.view("<f2").astype(np.float32)

    def _cast(self, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        with np.errstate(over="ignore"):
            half = x.astype("<f2").view("<u2")
        return np.where(np.isnan(x), np.uint16(0x7E00), half)


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16, the upper half of a float32; every NaN is sent as 0x7fc0.

    Attributes:
        rounding: ``"nearest"``, ties to even, or ``"stochastic"``: to one of the two neighbours, at random
            and without bias.
    """

    codec_id: ClassVar[int] = 6
    name: ClassVar[str] = "bf16"
    added: ClassVar[tuple[str, ...]] = ("rounding",)
    _bytes: ClassVar[int] = 2

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        checks.check_choice("BF16", "rounding", self.rounding, ("nearest", "stochastic"))
        if self._stochastic:
            object.__setattr__(self, "error", "unbiased")

    @property
    def _stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def variance_factor(self, count: int) -> float:
        """2**-16: an element's variance is at most a quarter of the squared step, and the step 2**-7 of it.

        Elements below 2**-126, whose steps are all 2**-133, are an exception: their error is below a step.
        """
        return 2.0**-16

    def native(self) -> dict[str, int | float]:
        """The C interface's ``variant``, the rounding."""
        return {"variant": int(self._stochastic)}

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Widens to float32, exactly."""
        return bfloat.widened(codes.view("<u2"))

    def _cast(self, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        if self._stochastic:
            add = uniform(x.size, noise).astype(np.uint32) >> np.uint32(8)
        else:
            add = np.uint32(0x7FFF) + (x.view(np.uint32) >> np.uint32(16) & np.uint32(1))
        return np.where(np.isnan(x), np.uint16(0x7FC0), bfloat.rounded(x, add)).astype("<u2")


@dataclass(frozen=True)
class NoCompression(_Cast):
    """Unchanged float32; every NaN is sent as 0x7fc00000."""

    codec_id: ClassVar[int] = 7
    name: ClassVar[str] = "none"
    _bytes: ClassVar[int] = 4

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Returns the numbers unchanged."""
        return codes.view("<f4").astype(np.float32)

    def _cast(self, x: np.ndarray, noise: NoiseKey) -> np.ndarray:
        bits = x.view(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FC00000), bits).astype("<u4")
