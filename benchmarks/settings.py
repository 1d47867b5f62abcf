"""The recipe, which is the same for every run of a training benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass

SGD, ADAM, ADAMW, RMSPROP = "sgd", "adam", "adamw", "rmsprop"
ONEBIT_ADAM, MUON = "onebit-adam", "muon"
OPTIMIZERS = (SGD, ADAM, ADAMW, RMSPROP, ONEBIT_ADAM, MUON)
RMSPROP_DECAY = 0.9
"""The decay of RMSProp's mean square (Tieleman and Hinton, 2012)."""
SCHEDULES = ("cosine", "polynomial", "staircase", "constant")
BORDERS = {"edge": "edge", "zero": "constant"}
"""The padding around an image that is moved, with NumPy's names."""


@dataclass(frozen=True)
class Settings:
    """A training recipe.

    Attributes:
        model: the model's name.
        norm: the normalization, as in :meth:`benchmarks.models.chains.Chain.variant`.
        dropout: the share of numbers that it drops; None is the model's own, as is None of ``norm``.
        epochs: the number of epochs, where ``steps`` is None.
        steps: the number of steps, whatever that is in epochs.
        batch_size: the samples of a rank in a step: images, or windows of text.
        optimizer: one of :data:`OPTIMIZERS`.
        lr: the learning rate at the start.
        schedule: one of :data:`SCHEDULES`; the first two let it fall to zero.
        power: the exponent of the polynomial decay, ``(1 - step / steps)^power`` (TernGrad's experiments:
            0.5).
        drops: the steps in which the staircase's learning rate falls, or shares of the training below 1.
        drop_factor: the factor by which it falls there.
        lr_warmup: the number of steps in which the learning rate rises from zero.
        margin: images are read with so many more pixels on both axes than the model takes, and cut: at
            random in training, in the middle in tests. So are those of data sets that have larger ones.
        shift: the most pixels by which training images are moved at random.
        border: the padding, one of :data:`BORDERS`; zero is the mean of the data set.
        mirror: the share of training images that are mirrored.
        momentum: the momentum of SGD.
        weight_decay: the weight decay, decoupled from the gradient in AdamW, 1-bit Adam and Muon, and
            otherwise added to it after the exchange.
        averaging: the decay of the moving average of the weights that is tested, in PyTorch (TernGrad's
            experiments: 0.9999); 0 tests the weights themselves.
        threads: the number of threads of a rank.
        device: the device, ``"cpu"`` or ``"cuda"``.
        autocast: the type that PyTorch's autocast computes in, ``"bf16"``; None is the parameters'.
        shards: the number of ranks that share a model's parameters out (FSDP).
        curve_points: the number of points of the loss curve, each an average.
    """

    model: str
    norm: str | None = None
    dropout: float | None = None
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.01
    schedule: str = "cosine"
    power: float = 0.5
    drops: tuple[float, ...] = ()
    drop_factor: float = 0.1
    lr_warmup: int = 0
    margin: int = 0
    shift: int = 0
    border: str = "edge"
    mirror: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    averaging: float = 0.0
    threads: int = 1
    device: str = "cpu"
    autocast: str | None = None
    shards: int = 1
    curve_points: int = 50

    def total_steps(self, steps_per_epoch: int) -> int:
        """The number of steps of a run."""
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    def learning_rate(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        lr = self.lr * min(1.0, (step + 1) / max(1, self.lr_warmup))
        if self.schedule == "constant":
            return lr
        if self.schedule == "polynomial":
            return lr * (1 - step / total) ** self.power
        if self.schedule == "staircase":
            passed = sum(step >= (drop if drop >= 1 else drop * total) for drop in self.drops)
            return lr * self.drop_factor**passed
        return lr * 0.5 * (1 + math.cos(math.pi * step / total))
