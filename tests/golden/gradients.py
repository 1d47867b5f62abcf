"""The tensors behind the golden files: integer arithmetic alone, so that any program can make them."""

from __future__ import annotations

import numpy as np

SHAPE = (7, 389)
"""2,723 elements: more than one block of every size, a short one at the end, odd rows and columns."""

STEP, SEED, RANK, TENSOR = 5, 1, 2, 3
"""The position in the noise."""


def gradient() -> np.ndarray:
    """shape=(2723,), dtype float32: element ``i`` is ``(u - 500) / 512 * 2**(i % 7 - 3)``.

    ``u`` is ``(7919 i^2 + 104729 i + 31) mod 1009``. Every product is exact in float32.
    """
    return _numbers(31)


def residual() -> np.ndarray:
    """The same with 613 in the place of 31, divided by 8."""
    return _numbers(613) / np.float32(8)


def _numbers(offset: int) -> np.ndarray:
    i = np.arange(SHAPE[0] * SHAPE[1], dtype=np.int64)
    u = (7919 * i * i + 104729 * i + offset) % 1009
    return ((u - 500).astype(np.float32) / np.float32(512)) * np.exp2(i % 7 - 3).astype(np.float32)
