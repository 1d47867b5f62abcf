"""The results of kernels for levels, computed with NumPy."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.papers.lanes import pack_levels, unpack_levels
from hvd_compress.codecs import ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.codecs.base import Shape
from hvd_compress.kernels.reference import compensated


class ReferenceLevels:
    """One tensor's norms, levels and sums, as :class:`CpuLevelBatch` has them, on NumPy arrays."""

    def norms(
        self,
        codec: LevelCodec,
        shape: Shape,
        gradient: np.ndarray,
        norms: np.ndarray,
        *,
        feedback: ErrorFeedback,
        residual: np.ndarray | None,
    ) -> None:
        if not math.prod(shape):
            return
        with np.errstate(all="ignore"):
            _, x = compensated(gradient, feedback, residual)
            norms[:] = codec.norms(x)

    def encode(
        self,
        codec: LevelCodec,
        shape: Shape,
        gradient: np.ndarray,
        norms: np.ndarray,
        words: np.ndarray,
        *,
        bits: int,
        feedback: ErrorFeedback,
        residual: np.ndarray | None,
        noise: NoiseKey,
    ) -> None:
        with np.errstate(all="ignore"):
            g, x = compensated(gradient, feedback, residual)
            levels = codec.to_levels(x, norms, noise)
            words[:] = pack_levels(codec, levels, bits)
            if residual is not None:
                residual[:] = feedback.carry(g, residual, codec.from_levels(levels, norms), noise)

    def decode(
        self,
        codec: LevelCodec,
        shape: Shape,
        norms: np.ndarray,
        words: np.ndarray,
        out: np.ndarray,
        *,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        levels = unpack_levels(codec, words, math.prod(shape), bits)
        with np.errstate(all="ignore"):
            out[:] = codec.from_levels(levels, norms) * np.float32(scale)
