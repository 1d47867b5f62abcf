"""Networks whose layers follow one another, as data: every framework builds them from the same lines.

An image goes through what :attr:`Chain.layers` lists, and then through a last dense layer with one unit for
each class. The activation follows each convolution and each dense layer but the last.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

NORMS = ("none", "lrn", "batch")
"""The normalizations: none; by local responses where the paper has it; by batches everywhere."""


@dataclass(frozen=True)
class Conv:
    """A square convolution; with ``batch``, batch normalization takes the place of its biases."""

    channels: int
    kernel: int
    stride: int = 1
    border: int | None = None
    """Zeros on each side; None is as many as keep the extent where the stride is 1."""
    batch: bool = False

    @property
    def padding(self) -> int:
        """Zeros on each side."""
        return self.kernel // 2 if self.border is None else self.border


@dataclass(frozen=True)
class Pool:
    """The largest of a square; with ``ceil``, also of one that begins inside and ends outside."""

    kernel: int
    stride: int
    ceil: bool = False


@dataclass(frozen=True)
class LRN:
    """Local response normalization: ``x / (bias + scale * sum of squares of size channels)^0.75``."""

    size: int
    scale: float
    bias: float


@dataclass(frozen=True)
class Inception:
    """Four branches side by side: 1x1, 3x3, 5x5 and a pool, reduced or projected by 1x1 convolutions."""

    one: int
    reduce3: int
    three: int
    reduce5: int
    five: int
    project: int
    batch: bool = False

    @property
    def branches(self) -> tuple[tuple[Conv, ...], ...]:
        """The convolutions of each branch; the last one's follows the pool."""
        chosen = (
            ((self.one, 1),),
            ((self.reduce3, 1), (self.three, 3)),
            ((self.reduce5, 1), (self.five, 5)),
            ((self.project, 1),),
        )
        return tuple(
            tuple(Conv(channels, kernel, batch=self.batch) for channels, kernel in branch)
            for branch in chosen
        )

    @property
    def channels(self) -> int:
        """The channels of all branches together."""
        return self.one + self.three + self.five + self.project


@dataclass(frozen=True)
class Mean:
    """The mean of each channel."""


@dataclass(frozen=True)
class Dropout:
    """Zeros in the place of this share of numbers, at random."""

    rate: float


@dataclass(frozen=True)
class Dense:
    """A fully connected layer."""

    units: int


Layer = Conv | Pool | LRN | Inception | Mean | Dropout | Dense


@dataclass(frozen=True)
class Chain:
    """A network.

    Attributes:
        layers: the layers, except the last one.
        activation: ``"relu"`` or ``"sigmoid"``.
        xavier: whether first weights are those of Caffe's filler of that name; otherwise they are torch's
            default, or with sigmoids such that activations neither saturate nor vanish.
        norm: the network's own normalization, one of :data:`NORMS`.
    """

    layers: tuple[Layer, ...]
    activation: str = "relu"
    xavier: bool = False
    norm: str = "none"

    def variant(self, norm: str | None = None, dropout: float | None = None) -> Chain:
        """The network with another normalization, and another share of dropped numbers; None is its own.

        Raises:
            ValueError: the network has no place for it.
        """
        norm = self.norm if norm is None else norm
        for asked, what, kind in (
            (norm == "lrn", "a normalization other than lrn", LRN),
            (norm == "batch", "a normalization other than batch", Conv),
            (dropout is not None, "no dropout", Dropout),
        ):
            if asked and not any(isinstance(layer, kind) for layer in self.layers):
                raise ValueError(f"expected {what}, for which it has no place")
        kept = [layer for layer in self.layers if norm == "lrn" or not isinstance(layer, LRN)]
        return dataclasses.replace(
            self, layers=tuple(_altered(layer, norm, dropout) for layer in kept), norm=norm
        )

    def deviation(self, fan_in: int) -> float | None:
        """The standard deviation of normal first weights; None: uniform within ``1 / sqrt(fan_in)``."""
        if self.activation == "sigmoid":
            return 4 / math.sqrt(fan_in)
        return 1 / math.sqrt(fan_in) if self.xavier else None


def _altered(layer: Layer, norm: str, dropout: float | None) -> Layer:
    if isinstance(layer, Conv | Inception):
        return dataclasses.replace(layer, batch=norm == "batch")
    if isinstance(layer, Dropout) and dropout is not None:
        return Dropout(dropout)
    return layer


def sigmoids(hidden: int, width: int) -> Chain:
    """A fully connected network with sigmoids, as 1-bit SGD's."""
    return Chain((Dense(width),) * hidden, activation="sigmoid")


_THIRDS, _HALVES = Pool(3, 2), Pool(2, 2)
_CEIL = Pool(3, 2, ceil=True)
_ALEXNET_LRN, _GOOGLENET_LRN = LRN(5, 1e-4, 2), LRN(5, 1e-4 / 5, 1)
_CIFARNET_LRN = LRN(9, 1e-3 / 9, 1)

CHAINS: dict[str, Chain] = {
    # LeCun et al., "Gradient-based learning applied to document recognition", 1998, as it is taught today:
    # ReLU, max pooling, every map connected to every map. The paper's 32x32 input is a 28x28 image with a
    # border of two, which the first convolution adds.
    "lenet": Chain((Conv(6, 5), _HALVES, Conv(16, 5, border=0), _HALVES, Dense(120), Dense(84))),
    # In one tower: Krizhevsky, "One weird trick for parallelizing CNNs", 2014. LRN: the paper of 2012.
    "alexnet": Chain(
        (
            *(Conv(64, 11, 4, 2), _ALEXNET_LRN, _THIRDS, Conv(192, 5), _ALEXNET_LRN, _THIRDS),
            *(Conv(384, 3), Conv(256, 3), Conv(256, 3), _THIRDS),
            *(Dropout(0.5), Dense(4096), Dropout(0.5), Dense(4096)),
        )
    ),
    # TernGrad, section 4.1, for crops of 24x24: the network for CIFAR-10 of TensorFlow's tutorial, which
    # TernGrad's published source calls cifar10_alexnet. By itself, it drops nothing.
    "cifarnet": Chain(
        (
            *(Conv(64, 5), _CEIL, _CIFARNET_LRN, Conv(64, 5), _CIFARNET_LRN, _CEIL),
            *(Dense(384), Dropout(0.0), Dense(192)),
        ),
        xavier=True,
        norm="lrn",
    ),
    # Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014.
    "vgg_a": Chain(
        (
            *(Conv(64, 3), _HALVES, Conv(128, 3), _HALVES, Conv(256, 3), Conv(256, 3), _HALVES),
            *(Conv(512, 3), Conv(512, 3), _HALVES, Conv(512, 3), Conv(512, 3), _HALVES),
            *(Dense(4096), Dropout(0.5), Dense(4096), Dropout(0.5)),
        ),
        xavier=True,
    ),
    # Szegedy et al., "Going deeper with convolutions", 2014, table 1; without auxiliary classifiers, as
    # in TernGrad.
    "googlenet": Chain(
        (
            *(Conv(64, 7, 2), _CEIL, _GOOGLENET_LRN),
            *(Conv(64, 1), Conv(192, 3), _GOOGLENET_LRN, _CEIL),
            *(Inception(64, 96, 128, 16, 32, 32), Inception(128, 128, 192, 32, 96, 64), _CEIL),
            *(Inception(192, 96, 208, 16, 48, 64), Inception(160, 112, 224, 24, 64, 64)),
            *(Inception(128, 128, 256, 24, 64, 64), Inception(112, 144, 288, 32, 64, 64)),
            *(Inception(256, 160, 320, 32, 128, 128), _CEIL),
            *(Inception(256, 160, 320, 32, 128, 128), Inception(384, 192, 384, 48, 128, 128)),
            *(Mean(), Dropout(0.4)),
        ),
        xavier=True,
        norm="lrn",
    ),
    # 1-bit SGD, section 5, for Switchboard.
    "dnn": sigmoids(hidden=7, width=2048),
}
"""Every chain, by the name that command lines use."""
