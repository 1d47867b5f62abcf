"""Sums in the order that the format prescribes.

A reconstruction value is a sum of floating-point numbers, and floating-point addition is not
associative: two programs agree on the bytes of a payload only if they add in the same order. These
functions *define* that order (``docs/format.md``, "Sums"); the C++ kernels follow it instruction by
instruction, with any number of threads.
"""

from __future__ import annotations

import numpy as np

LANES = 16
"""The number of independent partial sums: one AVX-512 register of float32, half a CUDA warp."""

CHUNK = 2048
"""The number of elements that one set of lanes adds up before the lanes are folded."""

ROW_CHUNK = 128
"""The number of a matrix's rows in one partial sum."""


def lane_sum(values: np.ndarray) -> np.ndarray:
    """Sums along the last axis in lane order.

    For up to :data:`CHUNK` elements, lane ``l`` adds elements ``l``, ``l + 16``, ``l + 32``, ... to +0 in
    that order; then lane ``l`` adds lane ``l + 8``, then ``l + 4``, ``l + 2``, ``l + 1``. For more
    elements, every chunk is summed in this way, and the chunk sums are summed by the same rule.

    Args:
        values: shape=(..., n), dtype float32 or float64; every addition uses that dtype.

    Returns:
        shape=(...), the same dtype.
    """
    *outer, n = values.shape
    chunks = max(1, -(-n // CHUNK))
    # Zeros that pad a short sum change nothing, as no lane is ever -0; a full chunk for each of many
    # short rows would take much memory.
    steps = CHUNK // LANES if chunks > 1 else -(-n // LANES)
    padded = np.zeros((*outer, chunks, steps, LANES), values.dtype)
    padded.reshape(*outer, -1)[..., :n] = values
    lanes = np.zeros((*outer, chunks, LANES), values.dtype)
    for step in range(steps):
        lanes += padded[..., step, :]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    sums = lanes[..., 0]
    return sums[..., 0] if chunks == 1 else lane_sum(sums)


def column_sum(matrix: np.ndarray) -> np.ndarray:
    """Sums a matrix, shape=(rows, columns), float32, over its rows.

    Within chunks of :data:`ROW_CHUNK` rows, the rows are added to +0 one after another; then the chunk
    sums are added to +0 one after another.
    """
    total = np.zeros(matrix.shape[1], matrix.dtype)
    for start in range(0, matrix.shape[0], ROW_CHUNK):
        partial = np.zeros_like(total)
        for row in matrix[start : start + ROW_CHUNK]:
            partial += row
        total += partial
    return total
