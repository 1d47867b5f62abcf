"""What the benchmarks train: the parts of a model that no framework has a say in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A model's outside.

    Attributes:
        input: height, width and channels of an image, or the tokens of a text.
        classes: number of classes, or of different tokens.
        parameters: trainable numbers, as everybody counts them.
        last_layer: name pattern of the classifier, which TernGrad leaves uncompressed.
        data: what it trains on where no path is given.
    """

    input: tuple[int, ...]
    classes: int
    parameters: int
    last_layer: str
    data: str


MODELS: dict[str, ModelSpec] = {
    "lenet": ModelSpec((28, 28, 1), 10, 61_706, "fc3.*", "digits"),
    "alexnet": ModelSpec((224, 224, 3), 1000, 61_100_840, "fc3.*", "synthetic"),
    "resnet20": ModelSpec((32, 32, 3), 10, 269_722, "fc.*", "synthetic"),
    "resnet50": ModelSpec((224, 224, 3), 1000, 25_557_032, "fc.*", "synthetic"),
    "gpt": ModelSpec((64,), 256, 470_784, "head.*", "text"),
}
"""Every model, by the name that command lines use."""
