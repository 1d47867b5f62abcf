"""A model's parameters and gradients, with waiting in the place of computing.

The hosts of a lab share one machine's processors, which no real hosts do, and steps take as long as its
scheduler decides. Here a step's computation takes time, as on an accelerator, but no processor: those are
left to what is to be measured.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

_FORWARD = 1 / 3
"""The forward pass's share of a step: a backward pass computes twice as much."""


class Paced(nn.Module):
    """Gives every parameter the same normally distributed gradient in each step.

    Gradients come as a backward pass brings them: from the last layer to the first, after equal times for
    each layer.

    Args:
        model: the model whose parameters have the names and shapes; it is taken apart.
        classes: the number of classes of the samples, which are not used.
        seconds: the duration of the forward and the backward pass.
    """

    def __init__(self, model: nn.Module, classes: int, seconds: float) -> None:
        super().__init__()
        self.model = model
        self._classes = classes
        self._forward = _FORWARD * seconds
        layers = sum(parameter.dim() > 1 for parameter in model.parameters())
        self._backward = (seconds - self._forward) / max(1, layers)
        self._gradients = [0.01 * torch.randn(p.shape) for p in model.parameters()]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Zeros, a row of ``classes`` for each label; their gradient passes through all parameters."""
        time.sleep(self._forward)
        labels = inputs.shape[:1] if inputs.dim() == 4 else inputs.shape
        chain = torch.zeros(*labels, self._classes)
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            seconds = self._backward if parameter.dim() > 1 else 0.0
            chain = _Layer.apply(chain, parameter, gradient, seconds)
        return chain


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        seconds: float,
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, chain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return chain, ctx.gradient.clone(), None, None
