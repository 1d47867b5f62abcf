"""The parameters and the arithmetic of four networks, derived from their architectures.

Images have 224 by 224 pixels, there are 1,000 classes, and one step of the backward pass computes the
gradients of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hvd_compress.perfmodel.networks import Layer, Network, network_of

CLASSES = 1000
IMAGE = 224


class _Builder:
    """Collects layers, and tracks the channels and the extent (height and width) of their outputs."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.channels, self.extent = 3, IMAGE

    def conv(
        self,
        name: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        norm: bool = False,
        after: int | None = None,
    ) -> None:
        """Adds a convolution with bias, or one without bias and a batch norm.

        Args:
            after: the number of the input's channels, if it differs from that of the layer before.
        """
        inputs = self.channels if after is None else after
        padding = kernel // 2 if padding is None else padding
        self.extent = (self.extent + 2 * padding - kernel) // stride + 1
        self.channels = channels
        weight = (channels, inputs, kernel, kernel)
        work = math.prod(weight) * self.extent**2
        self.layers.append(Layer(name, (weight,) if norm else (weight, (channels,)), work))
        if norm:
            # Its arithmetic is negligible compared to the convolution's.
            self.layers.append(Layer(f"{name}.norm", ((channels,), (channels,)), 0))

    def pool(self, kernel: int, stride: int, padding: int = 0, *, ceil: bool = False) -> None:
        """Adds a pooling layer; with ``ceil``, the extent is rounded up, as in Caffe."""
        room = self.extent + 2 * padding - kernel
        self.extent = (-(-room // stride) if ceil else room // stride) + 1

    def linear(self, name: str, outputs: int, inputs: int | None = None) -> None:
        """Adds a fully connected layer."""
        inputs = self.channels * self.extent**2 if inputs is None else inputs
        self.layers.append(Layer(name, ((outputs, inputs), (outputs,)), outputs * inputs))
        self.channels, self.extent = outputs, 1


def alexnet() -> Network:
    """AlexNet in one tower (Krizhevsky, "One weird trick", 2014), as in PyTorch."""
    net = _Builder()
    net.conv("conv1", 64, 11, stride=4, padding=2)
    net.pool(3, 2)
    net.conv("conv2", 192, 5)
    net.pool(3, 2)
    net.conv("conv3", 384, 3)
    net.conv("conv4", 256, 3)
    net.conv("conv5", 256, 3)
    net.pool(3, 2)
    for name, outputs in (("fc6", 4096), ("fc7", 4096), ("fc8", CLASSES)):
        net.linear(name, outputs)
    return Network("alexnet", tuple(net.layers))


def vgg_a() -> Network:
    """VGG-A with 11 layers (Simonyan and Zisserman, 2014, table 1)."""
    net = _Builder()
    for stage, widths in enumerate(((64,), (128,), (256, 256), (512, 512), (512, 512)), 1):
        for index, width in enumerate(widths, 1):
            net.conv(f"conv{stage}_{index}", width, 3)
        net.pool(2, 2)
    for name, outputs in (("fc6", 4096), ("fc7", 4096), ("fc8", CLASSES)):
        net.linear(name, outputs)
    return Network("vgg_a", tuple(net.layers))


def googlenet() -> Network:
    """GoogLeNet (Szegedy et al., 2014, table 1), without the two auxiliary classifiers."""
    net = _Builder()
    net.conv("conv1", 64, 7, stride=2)
    net.pool(3, 2, ceil=True)
    net.conv("conv2.reduce", 64, 1)
    net.conv("conv2", 192, 3)
    net.pool(3, 2, ceil=True)
    for name, *widths in (
        ("3a", 64, 96, 128, 16, 32, 32),
        ("3b", 128, 128, 192, 32, 96, 64),
        ("4a", 192, 96, 208, 16, 48, 64),
        ("4b", 160, 112, 224, 24, 64, 64),
        ("4c", 128, 128, 256, 24, 64, 64),
        ("4d", 112, 144, 288, 32, 64, 64),
        ("4e", 256, 160, 320, 32, 128, 128),
        ("5a", 256, 160, 320, 32, 128, 128),
        ("5b", 384, 192, 384, 48, 128, 128),
    ):
        if name in ("4a", "5a"):
            net.pool(3, 2, ceil=True)
        one, reduce3, three, reduce5, five, project = widths
        inputs = net.channels
        net.conv(f"{name}.1x1", one, 1)
        net.conv(f"{name}.3x3.reduce", reduce3, 1, after=inputs)
        net.conv(f"{name}.3x3", three, 3)
        net.conv(f"{name}.5x5.reduce", reduce5, 1, after=inputs)
        net.conv(f"{name}.5x5", five, 5)
        net.conv(f"{name}.pool", project, 1, after=inputs)
        net.channels = one + three + five + project
    net.linear("fc", CLASSES, net.channels)
    return Network("googlenet", tuple(net.layers))


def resnet50() -> Network:
    """ResNet-50 (He et al., 2015, table 1), with strides in the 3x3 convolutions, as is usual today."""
    net = _Builder()
    net.conv("conv1", 64, 7, stride=2, norm=True)
    net.pool(3, 2, 1)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for index in range(blocks):
            name, inputs, extent = f"conv{stage}_{index + 1}", net.channels, net.extent
            stride = 2 if stage > 2 and index == 0 else 1
            net.conv(f"{name}.1", width, 1, norm=True)
            net.conv(f"{name}.2", width, 3, stride=stride, norm=True)
            net.conv(f"{name}.3", 4 * width, 1, norm=True)
            if index == 0:
                net.extent = extent
                net.conv(f"{name}.shortcut", 4 * width, 1, stride=stride, norm=True, after=inputs)
    net.linear("fc", CLASSES, net.channels)
    return Network("resnet50", tuple(net.layers))


NETWORKS: dict[str, Callable[[], Network]] = {
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg_a": vgg_a,
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
