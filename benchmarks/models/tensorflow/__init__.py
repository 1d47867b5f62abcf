"""The models in Keras 3 on TensorFlow, written from the papers' descriptions, or Keras's own.

Images are channels-last, as everywhere in these benchmarks: TensorFlow's CPU kernels for convolution and
pooling know no other order. So convolutions' weights are (height, width, in, out), and a codec's groups
hold other elements than torch's do.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from benchmarks.models import MODELS
from benchmarks.models.tensorflow.alexnet import alexnet
from benchmarks.models.tensorflow.lenet import lenet
from benchmarks.models.tensorflow.resnet import resnet20, resnet50
from benchmarks.models.tensorflow.transformer import gpt

_BUILDERS: dict[str, Callable[[int], keras.Model]] = {
    "lenet": lenet,
    "alexnet": alexnet,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "gpt": gpt,
}


def build(name: str, classes: int | None = None) -> keras.Model:
    """A freshly initialised model, with as many classes as its paper's unless told otherwise."""
    return _BUILDERS[name](MODELS[name].classes if classes is None else classes)


def parameter_name(variable: keras.Variable) -> str:
    """Such as ``fc3.kernel``, which the name patterns of :data:`benchmarks.models.MODELS` know."""
    return str(variable.path).replace("/", ".")
