"""The parameters and the arithmetic of four networks, derived from their architectures.

Images have 224 by 224 pixels, there are 1,000 classes, and one step of the backward pass computes the
gradients of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from benchmarks.models.chains import CHAINS, Conv, Dense, Inception, Mean, Pool
from benchmarks.predict.layers import Layer, Network, network_of
from hvd_compress.codecs.base import Shape

CLASSES = 1000
IMAGE = 224


class _Builder:
    """Collects layers, and tracks the channels and the extent (height and width) of their outputs."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.channels, self.extent = 3, IMAGE

    def conv(self, name: str, spec: Conv, *, after: int | None = None) -> None:
        """Adds a convolution with bias, or one without bias and a batch norm.

        Args:
            name: the layer's.
            spec: its shape.
            after: the number of the input's channels, if it differs from that of the layer before.
        """
        inputs = self.channels if after is None else after
        channels, kernel = spec.channels, spec.kernel
        self.extent = (self.extent + 2 * spec.padding - kernel) // spec.stride + 1
        self.channels = channels
        weight = (channels, inputs, kernel, kernel)
        work = math.prod(weight) * self.extent**2
        if spec.batch:
            self._add(name, work, weight)
            # Its arithmetic is negligible compared to the convolution's.
            self._add(f"{name}.norm", 0, (channels,), (channels,))
        else:
            self._add(name, work, weight, (channels,))

    def pool(self, kernel: int, stride: int, padding: int = 0, *, ceil: bool = False) -> None:
        """Adds a pooling layer; with ``ceil``, the extent is rounded up, as in Caffe."""
        room = self.extent + 2 * padding - kernel
        self.extent = (-(-room // stride) if ceil else room // stride) + 1

    def linear(self, name: str, outputs: int) -> None:
        """Adds a fully connected layer."""
        inputs = self.channels * self.extent**2
        self._add(name, outputs * inputs, (outputs, inputs), (outputs,))
        self.channels, self.extent = outputs, 1

    def _add(self, name: str, work: int, *shapes: Shape) -> None:
        names = (f"{name}.weight", f"{name}.bias")
        self.layers.append(Layer(name, dict(zip(names, shapes, strict=False)), work))


def _chain(name: str) -> Network:
    """A network that is a chain; layers are numbered through, so that AlexNet's dense ones begin at 6."""
    net = _Builder()
    number = 0
    for layer in CHAINS[name].layers:
        number += isinstance(layer, Conv | Inception | Dense)
        if isinstance(layer, Conv):
            net.conv(f"conv{number}", layer)
        elif isinstance(layer, Pool):
            net.pool(layer.kernel, layer.stride, ceil=layer.ceil)
        elif isinstance(layer, Inception):
            inputs = net.channels
            for branch, convolutions in enumerate(layer.branches, 1):
                net.channels = inputs
                for depth, one in enumerate(convolutions, 1):
                    net.conv(f"inception{number}.{branch}.{depth}", one)
            net.channels = layer.channels
        elif isinstance(layer, Mean):
            net.extent = 1
        elif isinstance(layer, Dense):
            net.linear(f"fc{number}", layer.units)
    net.linear(f"fc{number + 1}", CLASSES)
    return Network(name, tuple(net.layers))


def resnet50() -> Network:
    """ResNet-50 (He et al., 2015, table 1), with strides in the 3x3 convolutions, as is usual today."""
    net = _Builder()
    net.conv("conv1", Conv(64, 7, 2, batch=True))
    net.pool(3, 2, 1)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for index in range(blocks):
            name, inputs, extent = f"conv{stage}_{index + 1}", net.channels, net.extent
            stride = 2 if stage > 2 and index == 0 else 1
            net.conv(f"{name}.1", Conv(width, 1, batch=True))
            net.conv(f"{name}.2", Conv(width, 3, stride, batch=True))
            net.conv(f"{name}.3", Conv(4 * width, 1, batch=True))
            if index == 0:
                net.extent = extent
                shortcut = Conv(4 * width, 1, stride, batch=True)
                net.conv(f"{name}.shortcut", shortcut, after=inputs)
    net.extent = 1
    net.linear("fc", CLASSES)
    return Network("resnet50", tuple(net.layers))


NETWORKS: dict[str, Callable[[], Network]] = {
    **{name: partial(_chain, name) for name in ("alexnet", "googlenet", "vgg_a")},
    "resnet50": resnet50,
}
"""The networks by the names that command lines and profiles use."""


def named(text: str) -> Network:
    """The network of a name in :data:`NETWORKS`, or of a user's own file or function.

    Raises:
        ValueError: there is no such network, file or function.
    """
    if text in NETWORKS:
        return NETWORKS[text]()
    if ":" not in text and not text.endswith(".json"):
        raise ValueError(
            f"--model: expected one of {', '.join(NETWORKS)}, a .json file or module:function, got {text!r}"
        )
    return network_of(text)
