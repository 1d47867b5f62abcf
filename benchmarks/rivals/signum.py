"""Signum with majority vote (Bernstein et al., "signSGD with Majority Vote", 2019).

Workers send the signs of their momentum, one bit per element. The workers' majority vote, again one bit, is
the step. 1-bit payloads in two shots carry both exactly: if all numbers are -1 or 1, so are the means of a
group's two sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.momentum import Momentum

SENT = "onebit:group=tensor,alpha=0,exchange=two_shot"
"""The compression of signs and votes."""


class Signs:
    """Computes the signs of each worker's momentum, -1 or 1; that of zero is 1.

    Args:
        decay: the decay of the momentum; 0 is signSGD.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self._momentum = Momentum(decay)

    def __call__(self, gradients: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """Adds the gradients, and returns the signs, both by parameter, shape=(workers, ...)."""
        velocities = self._momentum(gradients, step)
        return {name: 1.0 - 2.0 * (v < 0).to(v.dtype) for name, v in velocities.items()}


def signs_of_average(received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The steps of the same optimizer without compression: the signs of the average momentum."""
    return {name: average.sign() for name, average in received.items()}


def vote(seed: int = 0) -> Callable[[np.ndarray, dict[str, Any]], None]:
    """Returns an owner step for two shots: the sign of the average, with ties decided by a coin.

    Args:
        seed: the seed of the coins.
    """
    rng = np.random.default_rng([seed, 3])

    def decide(average: np.ndarray, state: dict[str, Any]) -> None:
        coins = rng.integers(0, 2, average.size) * np.float32(2) - np.float32(1)
        average[:] = np.where(average == 0, coins, np.sign(average))

    return decide
