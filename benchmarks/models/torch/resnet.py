"""ResNets (He et al., "Deep residual learning for image recognition", 2016): CIFAR-10's, and ResNet-50."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def _conv_bn(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(
        channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes the shortcut subsamples and pads (option A)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = _conv_bn(channels_in, channels_out, 3, stride)
        self.second = _conv_bn(channels_out, channels_out, 3)
        self.stride = stride
        self.padding = channels_out - channels_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, shape=(n, channels_out, height / stride, width / stride)."""
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return F.relu(self.second(F.relu(self.first(x))) + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1; where the shape changes the shortcut is a 1x1 convolution (option B).

    The stride is the 3x3 convolution's, as in every framework's model zoo.
    """

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.reduce = _conv_bn(channels_in, width, 1)
        self.spatial = _conv_bn(width, width, 3, stride)
        self.expand = _conv_bn(width, channels_out, 1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = _conv_bn(channels_in, channels_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, shape=(n, 4 width, height / stride, width / stride)."""
        y = F.relu(self.spatial(F.relu(self.reduce(x))))
        return F.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of residual blocks, global average pooling and one linear layer."""

    def __init__(self, stem: nn.Module, stages: list[nn.Module], features: int, classes: int):
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape=(n, classes)."""
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def of_cifar(depth: int, classes: int) -> ResNet:
    """Section 4.2: 32x32 images, three stages of n basic blocks, 16, 32 and 64 channels; depth 6 n + 2."""
    stages: list[nn.Module] = []
    channels = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(depth // 6):
            stages.append(BasicBlock(channels, width, stride if block == 0 else 1))
            channels = width
    stem = nn.Sequential(_conv_bn(3, 16, 3), nn.ReLU(inplace=True))
    return ResNet(stem, stages, channels, classes)


def resnet50(classes: int) -> ResNet:
    """Table 1: 224x224 images, stages of 3, 4, 6 and 3 bottlenecks."""
    stages: list[nn.Module] = []
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stages.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = width * Bottleneck.expansion
    stem = nn.Sequential(
        _conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
    )
    return ResNet(stem, stages, channels, classes)
