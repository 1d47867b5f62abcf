"""What is the same for every run of a training benchmark: the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """A training recipe.

    Attributes:
        model: the model's name.
        epochs: how often every image is seen, where ``steps`` is None.
        steps: how many steps are made, whatever that is in epochs.
        batch_size: images a rank and step.
        lr: the learning rate at the start.
        schedule: ``"cosine"`` lets it fall to zero, ``"constant"`` does not.
        momentum: of the optimizer, which is SGD.
        weight_decay: of the optimizer.
        threads: threads a rank computes with.
        curve_points: into how many points the loss curve is averaged.
    """

    model: str
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    lr: float = 0.01
    schedule: str = "cosine"
    momentum: float = 0.9
    weight_decay: float = 0.0
    threads: int = 1
    curve_points: int = 50

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps a run makes."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def learning_rate(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / total))
