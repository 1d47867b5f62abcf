"""What is the same for every run of a training benchmark: the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass

SGD, ADAMW, ONEBIT_ADAM, MUON = "sgd", "adamw", "onebit-adam", "muon"
OPTIMIZERS = (SGD, ADAMW, ONEBIT_ADAM, MUON)


@dataclass(frozen=True)
class Settings:
    """A training recipe.

    Attributes:
        model: the model's name.
        epochs: how often every sample is seen, where ``steps`` is None.
        steps: how many steps are made, whatever that is in epochs.
        batch_size: samples a rank and step: images, or windows of text.
        optimizer: one of :data:`OPTIMIZERS`.
        lr: the learning rate at the start.
        schedule: ``"cosine"`` and ``"polynomial"`` let it fall to zero, ``"constant"`` does not.
        power: of the polynomial decay, ``(1 - step / steps)^power`` (TernGrad's experiments: 0.5).
        lr_warmup: steps in which the learning rate rises from zero.
        shift: training images are moved by up to so many pixels at random.
        momentum: of SGD.
        weight_decay: of the optimizer.
        averaging: decay of the moving average of the weights that is tested, in PyTorch (TernGrad's
            experiments: 0.9999); 0 tests the weights themselves.
        threads: threads a rank computes with.
        device: what it computes on, ``"cpu"`` or ``"cuda"``.
        autocast: the type that PyTorch's autocast computes in, ``"bf16"``; None is the parameters'.
        shards: ranks that share a model's parameters out (FSDP); all ranks are replicas times shards.
        curve_points: into how many points the loss curve is averaged.
    """

    model: str
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.01
    schedule: str = "cosine"
    power: float = 0.5
    lr_warmup: int = 0
    shift: int = 0
    momentum: float = 0.9
    weight_decay: float = 0.0
    averaging: float = 0.0
    threads: int = 1
    device: str = "cpu"
    autocast: str | None = None
    shards: int = 1
    curve_points: int = 50

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps a run makes."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def learning_rate(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        lr = self.lr * min(1.0, (step + 1) / max(1, self.lr_warmup))
        if self.schedule == "constant":
            return lr
        if self.schedule == "polynomial":
            return lr * (1 - step / total) ** self.power
        return lr * 0.5 * (1 + math.cos(math.pi * step / total))
