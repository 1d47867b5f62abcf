"""The cases of the codec benchmark: every codec in its variants, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
    TopK,
    payload_length,
)
from hvd_compress.kernels.batch import Batch, Entry

Make = Callable[[list[Entry]], Batch]
"""Makes the batch of a codec's only tensor."""

ResidualDtype = Literal["float32", "bfloat16"]

CODECS: dict[str, Codec] = {
    "none": NoCompression(),
    "fp16": FP16(),
    "bf16": BF16(),
    "onebit 1024": OneBit(1024),
    "onebit 2048": OneBit(2048),
    "onebit tensor": OneBit("tensor"),
    "onebit row": OneBit("row"),
    "onebit column": OneBit("column"),
    "int8 linear 2048": Int8("linear", 2048),
    "int8 dynamic 2048": Int8("dynamic", 2048),
    "int8 static": Int8("static", 2048),
    "int8 mantissa": Int8("mantissa", 2048),
    "int8 linear tensor": Int8("linear", "tensor"),
    "int8 dynamic tensor": Int8("dynamic", "tensor"),
    "ternary 2048": Ternary(2048),
    "ternary tensor": Ternary("tensor"),
    "ecq l2 4096": ECQ(4, "l2", 4096),
    "ecq l2 2048": ECQ(4, "l2", 2048),
    "ecq linf 2048": ECQ(4, "linf", 2048),
    "ecq l2 tensor": ECQ(4, "l2", "tensor"),
    "topk 64 of 4096": TopK(4096, 64, 2),
    "ternary 2048 entropy": Ternary(2048, coding="entropy"),
    "ecq l2 4096 entropy": ECQ(4, "l2", 4096, "entropy"),
    "ecq linf 2048 entropy": ECQ(4, "linf", 2048, "entropy"),
}
"""Every variant, by its name in tables."""


@dataclass
class Buffers:
    """Memory that all cases share, so that none includes the first access to a page.

    PyTorch allocates it, as it does gradients: NumPy's large arrays begin 16 bytes behind the start of a
    cache line, so that each vector of 64 bytes would lie in two lines.

    Attributes:
        x: the gradient to encode, normally distributed, shape=(n,), dtype float32.
        residual_dtype: the dtype of residuals.
        residual: memory for a residual, shape=(n,), of this dtype.
        scratch: memory for anything, shape=(n,), dtype float32.
        out: the same for results.
    """

    x: np.ndarray
    residual_dtype: ResidualDtype = "float32"
    residual: Any = field(init=False)
    scratch: np.ndarray = field(init=False)
    out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        x = torch.from_numpy(self.x).clone()
        self.x = x.numpy()
        self.scratch = torch.zeros_like(x).numpy()
        # NumPy lacks bfloat16.
        rounded = self.residual_dtype == "bfloat16"
        self.residual = torch.zeros_like(x, dtype=torch.bfloat16) if rounded else self.scratch
        self.out = torch.zeros_like(x).numpy()


class CodecCase:
    """A codec of this package, as a batch of one tensor."""

    def __init__(self, codec: Codec, make: Make, buffers: Buffers) -> None:
        self.config: dict[str, Any] = codec.to_config()
        self.shape = matrix(buffers.x.size)
        self._buffers = buffers
        self._payload = np.zeros((1, codec.payload_bytes(self.shape)), np.uint8)
        # A second payload, so that the one to be decoded stays that of the gradient alone.
        self._fed = np.zeros_like(self._payload[0])
        feedback = stable_feedback(codec, buffers.x.size, buffers.residual_dtype)
        self._batch = make([Entry(codec, self.shape)])
        self._with_feedback = make([Entry(codec, self.shape, feedback)])
        buffers.residual[:] = 0

    @property
    def bits(self) -> float:
        """The bits per element of the payload that was encoded without error feedback."""
        used = payload_length(self._payload[0], self._payload[0].size)
        return 8 * used / self._buffers.x.size

    def encode(self) -> None:
        """Encodes without error feedback."""
        self._batch.encode([self._buffers.x], [None], [None], [0], self._payload[0])

    def encode_with_feedback(self) -> None:
        """Adds the residual, encodes, and keeps the error as the new residual, in one call."""
        residuals = [self._buffers.residual]
        self._with_feedback.encode([self._buffers.x], residuals, residuals, [0], self._fed)

    def decode(self) -> None:
        """Decodes, and overwrites the output."""
        self._batch.decode_sum([self._buffers.out], [0], self._payload)


def stable_feedback(
    codec: Codec, count: int, residual_dtype: ResidualDtype = "float32"
) -> ErrorFeedback:
    """The strongest error feedback with which a codec's residual stays bounded.

    Its coefficient is half the bound of ECQ-SGD's lemma 2 for unbiased codecs, and 1 for the others.
    Training refuses feedback around a fixed range, but the kernel's cost is measured there, too.
    """
    if codec.error == "contractive":
        return ErrorFeedback(1.0, 1.0, residual_dtype)
    alpha = min(1.0, 1 / (codec.variance_factor(count) + 1))
    return ErrorFeedback(alpha, 1.0, residual_dtype)


def matrix(count: int) -> tuple[int, int]:
    """The shape nearest to a square, for codecs with groups of rows or columns."""
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return rows, count // rows
