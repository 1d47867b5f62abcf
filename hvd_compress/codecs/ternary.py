"""TernGrad's quantizer (Wen et al., 2017, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base, checks, packing
from hvd_compress.codecs.levels import LevelCodec, usable
from hvd_compress.codecs.noise import NoiseKey, uniform
from hvd_compress.codecs.sums import lane_sum


@dataclass(frozen=True)
class Ternary(LevelCodec):
    """1.6 bits per element: minus one, zero or one, at random, times a scale.

    The scale of a bucket is its absolute maximum (equation 2) after clipping at ``clip`` standard
    deviations (equation 21); an element becomes plus or minus the scale with probability
    ``|x| / scale`` (equation 3), otherwise zero. The expectation is the clipped element: without
    clipping, there is no bias.

    If a bucket's mean is larger than ``clip`` standard deviations, elements are clipped at the mean
    instead: the paper's rule would erase a constant bucket.

    Attributes:
        bucket: the number of contiguous elements that share a scale, a multiple of 64, or ``"tensor"``
            (layer-wise ternarizing, section 3.3).
        clip: the paper's ``c``; ``None`` does not clip.
        coding: ``"plain"`` codes all take the same number of bits; ``"entropy"`` codes take fewer bits
            the more frequent they are, so that the size of a payload depends on the gradient.
    """

    codec_id: ClassVar[int] = 3
    name: ClassVar[str] = "ternary"
    error: ClassVar[Literal["unbiased", "contractive"]] = "unbiased"

    bucket: int | Literal["tensor"] = 2048
    clip: float | None = 2.5
    coding: Literal["plain", "entropy"] = "plain"

    def __post_init__(self) -> None:
        checks.check_group("Ternary", "bucket", self.bucket)
        if self.clip is not None:
            checks.check_number("Ternary", "clip", self.clip, 0.1, 1000.0)
            checks.store(self, "clip", float(self.clip))
        checks.check_choice("Ternary", "coding", self.coding, tuple(base.CODINGS))

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: one scale per bucket, then five trits per byte."""
        return base.grouped_layout(shape, self.bucket, packing.trit_bytes)

    @property
    def top_level(self) -> int:
        """One: levels are minus one, zero and one."""
        return 1

    def pack(self, symbols: np.ndarray) -> np.ndarray:
        """Packs codes as trits, block by block."""
        block = self.layout(symbols.shape).block
        codes = [packing.pack_trits(part) for part in base.groups_of(symbols, block)]
        return np.concatenate(codes)

    def unpack(self, codes: np.ndarray, count: int) -> np.ndarray:
        """Unpacks codes from trits; the inverse of :meth:`pack`."""
        layout = self.layout((count,))
        digits = [
            packing.unpack_trits(codes[start * layout.block_bytes :][: packing.trit_bytes(n)], n)
            for start, n in enumerate(base.group_lengths(count, layout.block))
        ]
        return np.concatenate(digits)

    def norms(self, x: np.ndarray) -> np.ndarray:
        """The absolute maxima after clipping; shape=(buckets,), dtype float32."""
        return np.array([self._norm(b) for b in base.groups_of(x, self.bucket)], np.float32)

    def units(self, norms: np.ndarray) -> np.ndarray:
        """The norms themselves, 0 below ``TINY`` and NaN where Inf; shape=(buckets,), dtype float32."""
        return np.where(usable(norms), norms, np.where(np.isfinite(norms), 0, np.nan)).astype(
            np.float32
        )

    def to_levels(self, x: np.ndarray, norms: np.ndarray, noise: NoiseKey) -> np.ndarray:
        """The levels by equation 3; shape=(n,), dtype int32."""
        inverse = np.divide(np.float32(1), norms, out=np.zeros_like(norms), where=usable(norms))
        magnitude = np.minimum(np.abs(x), base.spread(norms, x.size, self.bucket))
        with np.errstate(invalid="ignore"):
            probability = magnitude * base.spread(inverse, x.size, self.bucket)
        taken = uniform(x.size, noise) < probability * np.float32(2**24)
        return np.where(taken, np.where(x < 0, -1, 1), 0).astype(np.int32)

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Clips, then rounds each element to 0 or to plus or minus the scale at random; digit 2 is -1."""
        norms = self.norms(x)
        digits = (self.to_levels(x, norms, noise) % 3).astype(np.uint8)
        return self.units(norms), self.pack(digits)

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Decodes digit 0 as zero, 1 as the scale and 2 as minus the scale."""
        digits = self.unpack(codes, self.layout(shape).count)
        unit = np.array([0, 1, -1], np.float32)[digits]
        return unit * base.spread(scales, unit.size, self.bucket)

    def variance_factor(self, count: int) -> float:
        """The square root of the bucket's size: ECQ-SGD, lemma 1, with one level and without clipping."""
        return math.sqrt(count if self.bucket == "tensor" else min(count, self.bucket))

    def native(self) -> dict[str, int | float]:
        """The C interface's ``grouping``, ``group``, ``factor`` (0: no clipping) and ``coding``."""
        return {
            "factor": self.clip or 0.0,
            "coding": base.CODINGS[self.coding],
            **base.native_grouping(self.bucket),
        }

    def _norm(self, bucket: np.ndarray) -> np.float32:
        largest = np.max(np.abs(bucket))
        if not np.isfinite(largest):
            return np.float32(np.inf)
        if self.clip is None:
            return largest
        wide = bucket.astype(np.float64)
        mean = lane_sum(wide) / bucket.size
        variance = max(0.0, float(lane_sum(wide * wide) / bucket.size - mean * mean))
        limit = max(float(np.float32(self.clip)) * math.sqrt(variance), abs(float(mean)))
        return np.minimum(largest, np.float32(limit))
