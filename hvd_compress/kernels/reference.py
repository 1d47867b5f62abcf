"""The NumPy executor: slow, short, and the definition for the other executors."""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback, NoiseKey
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.payload import assemble, open_payload
from hvd_compress.kernels.interface import Kernels


class ReferenceKernels(Kernels):
    """Implements :class:`hvd_compress.kernels.interface.Kernels` on NumPy arrays.

    Gradients, residuals and outputs are float32 or float16 arrays; the caller has to convert bfloat16,
    which NumPy lacks.
    """

    name = "reference"

    def encode(
        self,
        codec: Codec,
        shape: Shape,
        gradient: np.ndarray,
        payload: np.ndarray,
        *,
        feedback: ErrorFeedback,
        residual: np.ndarray | None,
        noise: NoiseKey,
    ) -> None:
        """Encodes a tensor; arguments are those of :meth:`.interface.Kernels.encode`."""
        with np.errstate(all="ignore"):
            g, x = compensated(gradient, feedback, residual)
            scales, codes = quantize(codec, shape, x, noise)
            payload[:] = assemble(codec, shape, noise.step, scales, codes)
            if residual is not None:
                decoded = dequantize(codec, shape, scales, codes)
                residual[:] = feedback.carry(g, residual, decoded, noise)

    def decode_sum(
        self,
        codec: Codec,
        shape: Shape,
        payloads: np.ndarray,
        out: np.ndarray,
        *,
        step: int,
        scale: float = 1.0,
    ) -> None:
        """Decodes and adds payloads; arguments are those of :meth:`.interface.Kernels.decode_sum`."""
        total = np.zeros(math.prod(shape), np.float32)
        with np.errstate(all="ignore"):
            for payload in payloads:
                _, scales, codes = open_payload(codec, shape, step, payload)
                total += dequantize(codec, shape, scales, codes)
            out[:] = total * np.float32(scale)


def compensated(
    gradient: np.ndarray, feedback: ErrorFeedback, residual: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient in float32, and the values to encode: the gradient with the residual added.

    Raises:
        ValueError: a residual without feedback, or feedback without a residual.
    """
    if (residual is not None) != feedback.enabled:
        raise ValueError("encode: expected a residual exactly where error feedback is enabled")
    g = gradient.astype(np.float32)
    return g, g if residual is None else feedback.compensate(g, residual)


def quantize(
    codec: Codec, shape: Shape, x: np.ndarray, noise: NoiseKey
) -> tuple[np.ndarray, np.ndarray]:
    """Calls :meth:`Codec.quantize`; an empty tensor has neither scales nor codes."""
    if not x.size:
        return np.empty(0, np.float32), np.empty(0, np.uint8)
    return codec.quantize(x, shape, noise)


def dequantize(codec: Codec, shape: Shape, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Calls :meth:`Codec.dequantize`; an empty tensor has no elements to decode."""
    if not math.prod(shape):
        return np.empty(0, np.float32)
    return codec.dequantize(scales, codes, shape)
