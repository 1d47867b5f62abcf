"""One tensor's integer sums by the CPU's kernels."""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs import ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.checks import check_threads
from hvd_compress.codecs.packing import lane_bits
from hvd_compress.kernels.cpu_level_batch import CpuLevelBatch
from hvd_compress.kernels.entries import LevelEntry


class CpuLevels:
    """Batches of one tensor each; arguments are those of :class:`CpuLevelBatch` and its entries.

    Args:
        threads: the number of threads that a call may use.

    Raises:
        KernelError: the library was not built, or belongs to another version. Methods raise it if the
            library has no kernels for a codec or a width of lanes.
    """

    def __init__(self, threads: int = 1) -> None:
        check_threads("CpuLevels", threads)
        self.threads = threads

    def norms(
        self,
        codec: LevelCodec,
        shape: Shape,
        gradient: Any,
        norms: Any,
        *,
        feedback: ErrorFeedback,
        residual: Any | None,
    ) -> None:
        """Writes the norms of ``gradient + alpha residual``."""
        batch = self._batch(codec, shape, lane_bits(codec.top_level), feedback)
        batch.norms([gradient], [residual], norms)

    def encode(
        self,
        codec: LevelCodec,
        shape: Shape,
        gradient: Any,
        norms: Any,
        words: Any,
        *,
        bits: int,
        feedback: ErrorFeedback,
        residual: Any | None,
        noise: NoiseKey,
    ) -> None:
        """Writes the levels of ``gradient + alpha residual``, and updates the residual in place."""
        batch = self._batch(codec, shape, bits, feedback, noise)
        batch.encode([gradient], [residual], [residual], [noise.step], norms, words)

    def decode(
        self,
        codec: LevelCodec,
        shape: Shape,
        norms: Any,
        words: Any,
        out: Any,
        *,
        bits: int,
        scale: float = 1.0,
    ) -> None:
        """Computes ``out = (sum of levels * unit) * scale``."""
        self._batch(codec, shape, bits).decode([out], norms, words, scale)

    def _batch(
        self,
        codec: LevelCodec,
        shape: Shape,
        bits: int,
        feedback: ErrorFeedback = ErrorFeedback(0.0),  # noqa: B008
        noise: NoiseKey = NoiseKey(),  # noqa: B008
    ) -> CpuLevelBatch:
        return CpuLevelBatch([LevelEntry(codec, shape, feedback, noise, bits, 0, 0)], self.threads)
