"""What an integer sum makes of one tensor, written down from ``docs/exchanges.md``: no lanes, no words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.codecs import ErrorFeedback, LevelCodec, NoiseKey


def integer_sum(
    codec: LevelCodec,
    feedback: ErrorFeedback,
    gradients: Sequence[np.ndarray],
    residuals: Sequence[np.ndarray],
    noises: Sequence[NoiseKey],
    scale: float,
) -> np.ndarray:
    """Simulates all ranks' work on one tensor, by the oracle.

    Args:
        codec: the ranks'.
        feedback: the ranks'; their residuals move on where there is any.
        gradients: of each rank, shape=(n,), float32.
        residuals: of each rank, shape=(n,), float32.
        noises: each rank's position in the noise.
        scale: the factor on the sum.

    Returns:
        shape=(n,), float32.
    """
    inputs = list(gradients)
    if feedback.enabled:
        pairs = zip(gradients, residuals, strict=True)
        inputs = [feedback.compensate(g, h) for g, h in pairs]
    norms = np.max([codec.norms(x) for x in inputs], axis=0)
    total = np.zeros(inputs[0].size, np.int32)
    for rank, x in enumerate(inputs):
        levels = codec.to_levels(x, norms, noises[rank])
        total += levels
        if feedback.enabled:
            decoded = codec.from_levels(levels, norms)
            residuals[rank][:] = feedback.carry(gradients[rank], residuals[rank], decoded)
    return codec.from_levels(total, norms) * np.float32(scale)
