"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS
from benchmarks.settings import Settings


class MuonAndAdamW:
    """Two optimizers of PyTorch that step together, as Muon's authors combine them.

    ``torch.optim.Muon`` takes matrices only. Embeddings, the last layer, biases and the gains of
    normalisation go to AdamW. ``match_rms_adamw`` gives Muon's updates the size of AdamW's, so that one
    learning rate and one weight decay serve both.

    Args:
        model: the model whose parameters they update.
        settings: the recipe.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        embeddings = {
            id(p)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for p in module.parameters()
        }
        last = MODELS[settings.model].last_layer
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2 and id(parameter) not in embeddings
            chosen = (
                hidden if matrix and not fnmatchcase(name.removeprefix("module."), last) else rest
            )
            chosen.append(parameter)
        lr, decay = settings.lr, settings.weight_decay
        self._both: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, weight_decay=decay),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of both optimizers."""
        return [group for one in self._both for group in one.param_groups]

    def zero_grad(self) -> None:
        """Clears the gradients of both optimizers."""
        for one in self._both:
            one.zero_grad()

    def step(self) -> None:
        """Makes a step of both optimizers."""
        for one in self._both:
            one.step()
