"""The models in Keras 3 on TensorFlow, written from the papers' descriptions, or Keras's own.

Images are channels-last, as everywhere in these benchmarks: TensorFlow's CPU kernels for convolution and
pooling know no other order. So convolutions' weights are (height, width, in, out), and a codec's groups
hold other elements than torch's do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras

from benchmarks.models import CIFAR_DEPTHS, MODELS, chain_of
from benchmarks.models.tensorflow import chain, resnet
from benchmarks.models.tensorflow.transformer import gpt

_BUILDERS: dict[str, Callable[[int], keras.Model]] = {
    **{f"resnet{depth}": partial(resnet.of_cifar, depth) for depth in CIFAR_DEPTHS},
    "resnet50": resnet.resnet50,
    "gpt": gpt,
}


def build(
    name: str, classes: int | None = None, norm: str | None = None, dropout: float | None = None
) -> keras.Model:
    """A freshly initialised model; the arguments are those of :func:`benchmarks.models.torch.build`.

    Raises:
        ValueError: the model has no such variant, or only PyTorch has the model.
    """
    spec = MODELS[name]
    classes, variant = classes or spec.classes, chain_of(name, norm, dropout)
    if variant is None and name not in _BUILDERS:
        raise ValueError(
            f"{name}: expected a model that Keras has as well, got one of PyTorch's alone"
        )
    return chain.build(variant, classes, spec.input, name) if variant else _BUILDERS[name](classes)


def parameter_name(variable: keras.Variable) -> str:
    """A parameter's name, such as ``fc3.kernel``, as in :data:`benchmarks.models.MODELS`."""
    return str(variable.path).replace("/", ".")
