"""Signum with majority vote (Bernstein et al., "signSGD with Majority Vote", 2019).

Workers send the signs of their momentum, one bit an element. The vote of all workers, one bit again, is the
step. A 1-bit payload in two shots carries both exactly: of numbers that are all -1 or 1, the values of a
group's two sides are -1 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.momentum import Momentum

SENT = "onebit:group=tensor,alpha=0,exchange=two_shot"
"""The compression that carries signs and votes."""


class Signs:
    """The signs of each worker's momentum, -1 and 1; that of zero is 1.

    Args:
        decay: of the momentum; 0 is signSGD.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self._momentum = Momentum(decay)

    def __call__(self, gradients: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """By parameter, shape=(workers, ...)."""
        velocities = self._momentum(gradients, step)
        return {name: 1.0 - 2.0 * (v < 0).to(v.dtype) for name, v in velocities.items()}


def signs_of_average(received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The steps of the same optimizer without compression: what the bits cost is the difference to it."""
    return {name: average.sign() for name, average in received.items()}


def vote(seed: int = 0) -> Callable[[np.ndarray, dict[str, Any]], None]:
    """A step of the owners in two shots: the sign of the average; a coin decides a tie.

    Args:
        seed: of the coins.
    """
    rng = np.random.default_rng([seed, 3])

    def decide(average: np.ndarray, state: dict[str, Any]) -> None:
        coins = rng.integers(0, 2, average.size) * np.float32(2) - np.float32(1)
        average[:] = np.where(average == 0, coins, np.sign(average))

    return decide
