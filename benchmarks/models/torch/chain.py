"""The networks of :mod:`benchmarks.models.chains` in torch."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.models.chains import LRN, Chain, Conv, Dropout, Inception, Layer, Mean, Pool

_ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def build(chain: Chain, classes: int, sample: tuple[int, ...]) -> nn.Sequential:
    """Builds a network from images, shape=(n, channels, height, width), or vectors to logits, (n, classes).

    Parameters are called ``conv1.weight``, ``fc1.bias`` and the like, each kind numbered by itself.

    Args:
        chain: the network.
        classes: the number of classes.
        sample: the height, width and channels of an image, or the length of a vector.
    """
    return _Builder(chain, sample).build(classes)


class _Builder:
    """Appends layers, and keeps account of channels and extents."""

    def __init__(self, chain: Chain, sample: tuple[int, ...]) -> None:
        self._chain = chain
        self._channels, self._extent = sample[-1], sample[:-1]
        self._modules = nn.Sequential()
        self._numbers: dict[str, int] = {}

    def build(self, classes: int) -> nn.Sequential:
        for layer in self._chain.layers:
            self._add(layer)
        self._append("fc", self._linear(classes, last=True))
        return self._modules

    def _append(self, kind: str, *modules: nn.Module) -> None:
        """Numbers a layer; what follows its first module has the module's name and its own."""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        for position, module in enumerate(modules):
            own = f"_{type(module).__name__.lower()}" if position else ""
            self._modules.add_module(f"{kind}{number}{own}", module)

    def _add(self, layer: Layer) -> None:
        if isinstance(layer, Conv):
            modules = self._convolution(layer, self._channels)
            self._reshape(layer.channels, layer.kernel, layer.stride, 2 * layer.padding)
            self._append("conv", *modules)
        elif isinstance(layer, Pool):
            room = layer.stride - 1 if layer.ceil else 0
            self._reshape(self._channels, layer.kernel, layer.stride, room)
            self._append("pool", nn.MaxPool2d(layer.kernel, layer.stride, ceil_mode=layer.ceil))
        elif isinstance(layer, LRN):
            scale = layer.scale * layer.size  # Torch divides by it.
            self._append("lrn", nn.LocalResponseNorm(layer.size, scale, 0.75, layer.bias))
        elif isinstance(layer, Inception):
            *plain, pooled = layer.branches
            branches = [self._branch(one) for one in plain]
            pool = nn.MaxPool2d(3, 1, padding=1)
            self._append("inception", _Inception([*branches, self._branch(pooled, pool)]))
            self._channels = layer.channels
        elif isinstance(layer, Mean):
            self._append("mean", nn.AdaptiveAvgPool2d(1))
            self._extent = (1, 1)
        elif isinstance(layer, Dropout):
            self._append("dropout", nn.Dropout(layer.rate))
        else:
            self._append("fc", self._linear(layer.units), self._activation())

    def _linear(self, units: int, *, last: bool = False) -> nn.Linear:
        if "fc" not in self._numbers:
            self._append("flatten", nn.Flatten())
            self._channels *= math.prod(self._extent)
        linear = nn.Linear(self._channels, units)
        self._start(linear.weight, self._channels if not last else None)
        self._channels = units
        return linear

    def _convolution(self, layer: Conv, channels: int) -> list[nn.Module]:
        convolution = nn.Conv2d(
            channels,
            layer.channels,
            layer.kernel,
            stride=layer.stride,
            padding=layer.padding,
            bias=not layer.batch,
        )
        self._start(convolution.weight, channels * layer.kernel**2)
        norm = [nn.BatchNorm2d(layer.channels)] if layer.batch else []
        return [convolution, *norm, self._activation()]

    def _branch(self, branch: tuple[Conv, ...], *first: nn.Module) -> nn.Sequential:
        modules, channels = list(first), self._channels
        for layer in branch:
            modules += self._convolution(layer, channels)
            channels = layer.channels
        return nn.Sequential(*modules)

    def _activation(self) -> nn.Module:
        return _ACTIVATIONS[self._chain.activation]()

    def _start(self, weight: torch.Tensor, fan_in: int | None) -> None:
        deviation = None if fan_in is None else self._chain.deviation(fan_in)
        if deviation is not None:
            nn.init.normal_(weight, std=deviation)

    def _reshape(self, channels: int, kernel: int, stride: int, room: int) -> None:
        self._channels = channels
        self._extent = tuple((side + room - kernel) // stride + 1 for side in self._extent)


class _Inception(nn.Module):
    """Branches whose channels lie one behind the other."""

    def __init__(self, branches: list[nn.Sequential]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape=(n, channels of all branches, height, width)."""
        return torch.cat([branch(x) for branch in self.branches], 1)
