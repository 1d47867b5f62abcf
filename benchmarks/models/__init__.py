"""The models that benchmarks train: their properties that do not depend on a framework."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.models.chains import CHAINS, Chain


@dataclass(frozen=True)
class ModelSpec:
    """A model's input, output and size.

    Attributes:
        input: the height, width and channels of an image, the tokens of a text, or the length of a vector.
        classes: the number of classes, or of different tokens.
        parameters: the number of trainable numbers.
        last_layer: the name pattern of the classifier, which TernGrad leaves uncompressed; empty if the
            classifier has no parameters of its own.
        data: the data to train on where no path is given.
    """

    input: tuple[int, ...]
    classes: int
    parameters: int
    last_layer: str
    data: str


CIFAR_DEPTHS = (20, 32, 44, 56, 110)
"""The depths of the ResNets for CIFAR-10 (He et al., section 4.2)."""


MODELS: dict[str, ModelSpec] = {
    "lenet": ModelSpec((28, 28, 1), 10, 61_706, "fc3.*", "digits"),
    "cifarnet": ModelSpec((24, 24, 3), 10, 1_068_298, "fc3.*", "synthetic"),
    "alexnet": ModelSpec((224, 224, 3), 1000, 61_100_840, "fc3.*", "synthetic"),
    "vgg_a": ModelSpec((224, 224, 3), 1000, 132_863_336, "fc3.*", "synthetic"),
    "googlenet": ModelSpec((224, 224, 3), 1000, 6_998_552, "fc1.*", "synthetic"),
    "resnet20": ModelSpec((32, 32, 3), 10, 269_722, "fc.*", "synthetic"),
    "resnet32": ModelSpec((32, 32, 3), 10, 464_154, "fc.*", "synthetic"),
    "resnet44": ModelSpec((32, 32, 3), 10, 658_586, "fc.*", "synthetic"),
    "resnet56": ModelSpec((32, 32, 3), 10, 853_018, "fc.*", "synthetic"),
    "resnet110": ModelSpec((32, 32, 3), 10, 1_727_962, "fc.*", "synthetic"),
    "resnet50": ModelSpec((224, 224, 3), 1000, 25_557_032, "fc.*", "synthetic"),
    # The paper does not say what goes in. With eleven frames of 24 filters and their first and second
    # derivatives, there are 46 million parameters, as published.
    "dnn": ModelSpec((792,), 9304, 45_866_072, "fc8.*", "synthetic"),
    "gpt": ModelSpec((64,), 256, 470_784, "head.*", "text"),
    # It is trained until it is better than a table of n-grams: benchmarks.trained.
    "gpt_history": ModelSpec((64,), 256, 377_728, "head.*", "text"),
    # GPT-2's smallest. It has 1,024 places; text comes in shorter windows, which a CPU can train on.
    "gpt2": ModelSpec((128,), 50_257, 124_439_808, "", "text"),
}
"""Every model, by the name that command lines use."""


def chain_of(name: str, norm: str | None = None, dropout: float | None = None) -> Chain | None:
    """A model's layers, if they follow one another.

    Args:
        name: the name of the model.
        norm: the same as in :meth:`benchmarks.models.chains.Chain.variant`.
        dropout: the same as there.

    Raises:
        ValueError: the model has no such variant.
    """
    if name in CHAINS:
        try:
            return CHAINS[name].variant(norm, dropout)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if norm is not None or dropout is not None:
        raise ValueError(f"{name}: expected its own normalization, and no dropout")
    return None
