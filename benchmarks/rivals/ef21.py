"""EF21 (Richtárik, Sokolov, Fatkhullin, 2021): workers send the differences of gradients to an estimate.

Each worker encodes ``g - h`` and adds what receivers decode of it to ``h``; receivers add the average to
the average of all ``h``, which is the gradient of the step. With momentum before it
(:class:`benchmarks.rivals.momentum.Momentum`), this is EF21-SGDM (Fatkhullin, Tyurin, Richtárik, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.codecs.noise import NoiseKey


@dataclass(frozen=True)
class EF21(ErrorFeedback):
    """A worker's rule, for :class:`hvd_compress.exchanges.reference.Simulation` only, not for kernels.

    The residual is the worker's estimate ``h``. The coefficients have no effect.
    """

    def compensate(self, gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The difference ``g - h``, which is encoded."""
        return gradient - residual

    def carry(
        self, gradient: np.ndarray, residual: np.ndarray, decoded: np.ndarray, noise: NoiseKey
    ) -> np.ndarray:
        """The new estimate, ``h + decoded``; elements that are not finite in ``decoded`` keep ``h``."""
        return np.where(np.isfinite(decoded), residual + decoded, residual)


class Estimate:
    """The average of all workers' estimates, which receivers keep."""

    def __init__(self) -> None:
        self._sum: dict[str, torch.Tensor] = {}

    def __call__(self, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds the received averages, and returns the estimates by parameter."""
        for name, change in received.items():
            before = self._sum.get(name)
            self._sum[name] = change if before is None else before + change
        return dict(self._sum)
