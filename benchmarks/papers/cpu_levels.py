"""The CPU executor of integer sums: the native library, called with raw pointers."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from hvd_compress.codecs import ErrorFeedback, LevelCodec, NoiseKey
from hvd_compress.codecs.checks import check_threads
from hvd_compress.kernels.cpu_arrays import feedback_pointer, pointer_to
from hvd_compress.kernels.cpu_library import load, spec_pointer
from hvd_compress.kernels.interface import LevelKernels
from hvd_compress.kernels.native import KernelError, Shape, dtype_of, noise_of


class CpuLevels(LevelKernels):
    """Implements :class:`hvd_compress.kernels.interface.LevelKernels` for NumPy arrays and CPU tensors.

    Arrays may be of the same kinds as in :class:`hvd_compress.kernels.cpu.CpuKernels`.

    Args:
        threads: the number of threads that a call may use.

    Raises:
        KernelError: the library was not built, or belongs to another version. Methods raise it if the
            library has no kernels for a codec or a width of lanes.
    """

    name = "cpu"

    def __init__(self, threads: int = 1) -> None:
        check_threads("CpuLevels", threads)
        self.threads = threads
        self._library = load()

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
        count, buckets = math.prod(shape), codec.layout(shape).scales
        status = self._library.hvdc_level_norms(
            spec_pointer(codec, shape),
            pointer_to("gradient", gradient, count),
            dtype_of("gradient", gradient),
            feedback_pointer(feedback, residual, count),
            pointer_to("norms", norms, buckets, "float32"),
            buckets,
            self.threads,
        )
        _check(status, codec, shape)

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
        count, size = math.prod(shape), codec.level_words(shape, bits)
        status = self._library.hvdc_level_encode(
            spec_pointer(codec, shape),
            ctypes.byref(noise_of(noise)),
            pointer_to("gradient", gradient, count),
            dtype_of("gradient", gradient),
            feedback_pointer(feedback, residual, count),
            pointer_to("norms", norms, codec.layout(shape).scales, "float32"),
            bits,
            pointer_to("words", words, size, "int32"),
            size,
            self.threads,
        )
        _check(status, codec, shape)

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
        count, size = math.prod(shape), codec.level_words(shape, bits)
        status = self._library.hvdc_level_decode(
            spec_pointer(codec, shape),
            pointer_to("norms", norms, codec.layout(shape).scales, "float32"),
            bits,
            pointer_to("words", words, size, "int32"),
            size,
            scale,
            pointer_to("out", out, count),
            dtype_of("out", out),
            self.threads,
        )
        _check(status, codec, shape)


def _check(status: int, codec: LevelCodec, shape: Shape) -> None:
    if status:
        raise KernelError(
            f"{codec!r}, shape {shape}: the native library answered with status {status}"
        )
