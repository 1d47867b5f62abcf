"""The models in torch, written from the papers' descriptions. Images are channels-first."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.models import MODELS
from benchmarks.models.torch.alexnet import AlexNet
from benchmarks.models.torch.lenet import LeNet
from benchmarks.models.torch.resnet import resnet20, resnet50
from benchmarks.models.torch.transformer import gpt

_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "lenet": LeNet,
    "alexnet": AlexNet,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "gpt": gpt,
}


def build(name: str, classes: int | None = None) -> nn.Module:
    """A freshly initialised model, with as many classes as its paper's unless told otherwise."""
    return _BUILDERS[name](MODELS[name].classes if classes is None else classes)
