"""Momentum of each worker, before compression."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Momentum:
    """Updates each worker's velocity by ``v <- decay v + g``.

    Args:
        decay: the factor of ``v`` in a step.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._velocity: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """Adds the gradients, and returns the velocities, both by parameter, shape=(workers, ...)."""
        for name, g in gradients.items():
            before = self._velocity.get(name)
            self._velocity[name] = g.clone() if before is None else self._decay * before + g
        return dict(self._velocity)
