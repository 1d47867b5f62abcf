"""Averages of a model's weights over the steps, which are tested in the place of the last ones."""

from __future__ import annotations

import copy

import torch
from torch import nn


class WeightAverage:
    """The exponential moving average of a model's weights (TernGrad, section 4).

    The first steps count more, as in TensorFlow, which the paper used: the decay of update ``n`` is
    ``min(decay, (1 + n) / (10 + n))``. Else the first weights would still be a third of the average after
    the paper's ten thousand steps of 0.9999.

    Args:
        model: the model to average.
        decay: the decay of the average, from 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay, self._updates = model, decay, 0
        self._average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        """Adds the model's weights to the average."""
        kept = min(self._decay, (1 + self._updates) / (10 + self._updates))
        self._updates += 1
        for name, parameter in self._model.named_parameters():
            self._average[name].lerp_(parameter.detach(), 1 - kept)

    def model(self) -> nn.Module:
        """A copy of the model with the averaged weights."""
        averaged = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, parameter in averaged.named_parameters():
                parameter.copy_(self._average[name])
        return averaged
