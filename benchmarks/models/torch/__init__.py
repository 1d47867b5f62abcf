"""The models in torch, written from the papers' descriptions. Images are channels-first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.models import CIFAR_DEPTHS, MODELS, chain_of
from benchmarks.models.torch import chain, resnet
from benchmarks.models.torch.transformer import gpt, gpt2, gpt_history

_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    **{f"resnet{depth}": partial(resnet.of_cifar, depth) for depth in CIFAR_DEPTHS},
    "resnet50": resnet.resnet50,
    "gpt": gpt,
    "gpt_history": gpt_history,
    "gpt2": gpt2,
}


def build(
    name: str, classes: int | None = None, norm: str | None = None, dropout: float | None = None
) -> nn.Module:
    """A freshly initialised model.

    Args:
        name: the name of the model.
        classes: the number of classes; None is the paper's number.
        norm: the same as in :meth:`benchmarks.models.chains.Chain.variant`.
        dropout: the same as there.

    Raises:
        ValueError: the model has no such variant.
    """
    spec = MODELS[name]
    classes, variant = classes or spec.classes, chain_of(name, norm, dropout)
    return chain.build(variant, classes, spec.input) if variant else _BUILDERS[name](classes)
