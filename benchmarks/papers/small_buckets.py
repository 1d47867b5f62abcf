"""TernGrad with buckets smaller than kernels take, as ECQ-SGD's paper compares with it; in NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.native import Watch
from hvd_compress.codecs import Codec, NoiseKey, Ternary
from hvd_compress.codecs.payload import assemble
from hvd_compress.exchanges.simulation import Arithmetic


@dataclass(frozen=True)
class SmallTernary(Ternary):
    """:class:`hvd_compress.codecs.Ternary` with a bucket of any size.

    Kernels write codes in blocks of 64, and a bucket is a whole number of blocks. The reference knows no
    such limit, so that only the check of the size is left out.
    """

    def __post_init__(self) -> None:
        Ternary(clip=self.clip, coding=self.coding)


class Reference(Arithmetic):
    """The arithmetic of the references, which writes payloads and shows them.

    Args:
        watch: the same as in :class:`benchmarks.papers.native.Native`.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def through(
        self, codec: Codec, shape: tuple[int, ...], x: np.ndarray, noise: NoiseKey
    ) -> np.ndarray:
        scales, codes = codec.quantize(x, shape, noise)
        self._watch(codec, shape, noise, assemble(codec, shape, noise.step, scales, codes))
        return codec.dequantize(scales, codes, shape)
