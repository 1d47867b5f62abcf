"""What the benchmarks train: the parts of a model that no framework has a say in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A model's outside.

    Attributes:
        image: height, width and channels of an input image.
        classes: number of classes.
        parameters: trainable numbers, as everybody counts them.
        last_layer: name pattern of the classifier, which TernGrad leaves uncompressed.
        data: what it trains on where no path is given.
    """

    image: tuple[int, int, int]
    classes: int
    parameters: int
    last_layer: str
    data: str


MODELS: dict[str, ModelSpec] = {
    "lenet": ModelSpec((28, 28, 1), 10, 61_706, "fc3.*", "digits"),
    "alexnet": ModelSpec((224, 224, 3), 1000, 61_100_840, "fc3.*", "synthetic"),
    "resnet20": ModelSpec((32, 32, 3), 10, 269_722, "fc.*", "synthetic"),
    "resnet50": ModelSpec((224, 224, 3), 1000, 25_557_032, "fc.*", "synthetic"),
}
"""Every model, by the name that command lines use."""
