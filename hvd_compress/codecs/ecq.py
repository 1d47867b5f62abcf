"""The quantizer of QSGD and ECQ-SGD (Wu et al., 2018, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from hvd_compress.codecs import base, checks, packing, rotation, stability
from hvd_compress.codecs.feedback import OFF, ErrorFeedback
from hvd_compress.codecs.levels import LevelCodec, usable
from hvd_compress.codecs.noise import NoiseKey, uniform
from hvd_compress.codecs.sums import lane_sum

_NORMS = {"l2": 0, "linf": 1}
_ROTATED = 2


class _FeedbackByNorm:
    """The paper's error feedback with the paper's norm; with ``"linf"``, records show no gain from any."""

    def __get__(self, codec: ECQ | None, owner: type[ECQ]) -> ErrorFeedback:
        norm = owner.norm if codec is None else codec.norm
        return ErrorFeedback(0.01, 1.0) if norm == "l2" else OFF


@dataclass(frozen=True)
class ECQ(LevelCodec):
    """``levels`` evenly spaced magnitudes up to a norm, chosen at random and without bias.

    An element between two levels becomes the upper one with the probability that makes the expectation
    equal to the element (equations 8 and 9). With error feedback this is ECQ-SGD, without it QSGD. The
    paper's settings are ``levels=4, norm="l2"``; with the same number of bits, the defaults have less
    noise (``docs/codecs/ecq.md``).

    Attributes:
        levels: the paper's ``s``, the number of non-zero magnitudes, 1 to 127.
        norm: the scaling factor of a bucket, ``"l2"`` or ``"linf"``.
        bucket: the number of contiguous elements that share a norm, a multiple of 64, or ``"tensor"``.
        coding: ``"plain"`` codes all take the same number of bits; ``"entropy"`` codes take fewer bits
            the more frequent they are, so that the size of a payload depends on the gradient.
        rotate: whether each bucket is rotated (:mod:`hvd_compress.codecs.rotation`) before its norm is
            taken, and back after decoding: buckets with few large elements then have less noise. It takes
            ``norm="linf"``, and a power of two as ``bucket``.
    """

    codec_id: ClassVar[int] = 4
    name: ClassVar[str] = "ecq"
    error: ClassVar[Literal["unbiased", "contractive"]] = "unbiased"
    feedback: ClassVar[Any] = _FeedbackByNorm()
    added: ClassVar[tuple[str, ...]] = ("rotate",)

    levels: int = 7
    norm: Literal["l2", "linf"] = "linf"
    bucket: int | Literal["tensor"] = 512
    coding: Literal["plain", "entropy"] = "plain"
    rotate: bool = False

    def __post_init__(self) -> None:
        checks.check_number("ECQ", "levels", self.levels, 1, 127, integer=True)
        checks.store(self, "levels", int(self.levels))
        checks.check_choice("ECQ", "norm", self.norm, tuple(_NORMS))
        checks.check_group("ECQ", "bucket", self.bucket)
        checks.check_choice("ECQ", "coding", self.coding, tuple(base.CODINGS))
        checks.check_flag("ECQ", "rotate", self.rotate)
        if self.rotate:
            if isinstance(self.bucket, str) or self.bucket & (self.bucket - 1):
                raise ValueError(
                    f"ECQ.bucket: expected a power of two with rotate=True, got {self.bucket!r}"
                )
            if self.norm != "linf":
                raise ValueError(
                    f"ECQ.norm: expected 'linf' with rotate=True, got {self.norm!r}, whose noise is larger "
                    f"in a rotated bucket"
                )

    @property
    def on_device(self) -> bool:
        """Whether CUDA kernels exist for the codec: not for rotations."""
        return not self.rotate

    @property
    def bits(self) -> int:
        """The number of bits in a code: the ceiling of log2(2 s + 1)."""
        return (2 * self.levels).bit_length()

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: one scale per bucket, then ``bits`` bit planes."""
        return base.grouped_layout(shape, self.bucket, lambda n: packing.plane_bytes(n, self.bits))

    @property
    def top_level(self) -> int:
        """The number of non-zero magnitudes."""
        return self.levels

    def pack(self, symbols: np.ndarray) -> np.ndarray:
        """Packs codes as bit planes, block by block."""
        return packing.pack_planes(symbols, self.bits)

    def unpack(self, codes: np.ndarray, count: int) -> np.ndarray:
        """Unpacks codes from bit planes; the inverse of :meth:`pack`."""
        return packing.unpack_planes(codes, count, self.bits)

    def norms(self, x: np.ndarray) -> np.ndarray:
        """The norm of each bucket; shape=(buckets,), dtype float32."""
        turned = self._turned(x)
        return np.array([self._norm(b) for b in base.groups_of(turned, self.bucket)], np.float32)

    def units(self, norms: np.ndarray) -> np.ndarray:
        """The norms divided by s; shape=(buckets,), dtype float32."""
        finite = np.where(usable(norms), norms, np.float32(0))
        unit = base.unit_of(finite, np.float32(self.levels))
        return np.where(np.isfinite(norms), unit, np.float32(np.nan)).astype(np.float32)

    def to_levels(self, x: np.ndarray, norms: np.ndarray, noise: NoiseKey) -> np.ndarray:
        """The levels by equations 8 and 9; shape=(n,), dtype int32."""
        x, top = self._turned(x), np.float32(self.levels)
        kept = usable(norms)
        inverse = np.divide(top, norms, out=np.zeros_like(norms), where=kept)
        with np.errstate(invalid="ignore"):
            y = np.abs(x) * base.spread(inverse, x.size, self.bucket)
        y = np.where(base.spread(kept, x.size, self.bucket), np.minimum(y, top), np.float32(0))
        below = np.floor(y)
        up = uniform(x.size, noise) < (y - below) * np.float32(2**24)
        level = below.astype(np.int32) + up
        return np.where(np.signbit(x), -level, level).astype(np.int32)

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scales by the norm, then rounds up or down at random; a code is the level plus s."""
        norms = self.norms(x)
        offset = self.to_levels(x, norms, noise) + self.levels
        blank = base.spread(np.isinf(norms), x.size, self.bucket)
        codes = np.where(blank, 0, offset).astype(np.uint8)
        return self.units(norms), self.pack(codes)

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Multiplies (code - s) by the bucket's scale, which is norm / s."""
        count = self.layout(shape).count
        offset = self.unpack(codes, count)
        level = offset.astype(np.float32) - np.float32(self.levels)
        return self._turned_back(level * base.spread(scales, count, self.bucket))

    def from_levels(self, levels: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """Multiplies levels by the units; the inverse rotation follows, as it is linear."""
        return self._turned_back(super().from_levels(levels, norms))

    def variance_factor(self, count: int) -> float:
        """The bound that holds for every tensor, where d is the bucket's size.

        For ``"l2"``, the bound is min(d / s^2, sqrt(d) / s) (lemma 1). The paper has no lemma for
        ``"linf"``; there, the bound (sqrt(1 + (d - 1) / s^2) - 1) / 2 is smaller and tight
        (``docs/codecs/ecq.md``).
        """
        d = count if self.bucket == "tensor" else min(count, self.bucket)
        if self.norm == "linf":
            return (math.sqrt(1 + (d - 1) / self.levels**2) - 1) / 2
        return stability.variance_factor(d, self.levels)

    def native(self) -> dict[str, int | float]:
        """The C interface's ``variant`` (the norm), ``levels``, ``coding``, ``grouping`` and ``group``."""
        return {
            "variant": _ROTATED if self.rotate else _NORMS[self.norm],
            "levels": self.levels,
            "coding": base.CODINGS[self.coding],
            **base.native_grouping(self.bucket),
        }

    def _turned(self, x: np.ndarray) -> np.ndarray:
        if not self.rotate:
            return x
        with np.errstate(over="ignore", invalid="ignore"):
            return rotation.rotate(x, self.bucket)  # type: ignore[arg-type]

    def _turned_back(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return rotation.rotate_back(x, self.bucket) if self.rotate else x  # type: ignore[arg-type]

    def _norm(self, bucket: np.ndarray) -> np.float32:
        largest = np.max(np.abs(bucket))
        if not np.isfinite(largest) or (self.rotate and largest > rotation.LARGEST):
            return np.float32(np.inf)
        if self.norm == "linf":
            return largest
        wide = bucket.astype(np.float64)
        with np.errstate(over="ignore"):
            return np.float32(np.sqrt(lane_sum(wide * wide)))


@dataclass(frozen=True)
class QSGD(ECQ):
    """QSGD (Alistarh et al., 2017): :class:`ECQ` without error feedback, whatever the norm.

    The bytes are the same.
    """

    feedback: ClassVar[ErrorFeedback] = OFF
