"""The networks of :mod:`benchmarks.models.chains` in Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import initializers, layers

from benchmarks.models.chains import LRN, Chain, Conv, Dropout, Inception, Layer, Mean, Pool
from benchmarks.models.tensorflow.layers import batch_norm, linear, uniform


def build(chain: Chain, classes: int, sample: tuple[int, ...], name: str) -> keras.Model:
    """Builds a network from images, shape=(n, height, width, channels), or vectors to logits, (n, classes).

    Layers have the names that they have in torch.
    """
    inputs = keras.Input(sample)
    builder = _Builder(chain)
    x = inputs
    for layer in chain.layers:
        x = builder.add(layer, x)
    x = builder.flat(x)
    return keras.Model(inputs, linear(classes, x.shape[-1], name=builder.name("fc"))(x), name=name)


class _Builder:
    """Applies layers, and numbers each kind."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._numbers: dict[str, int] = {}

    def name(self, kind: str) -> str:
        """The name of the next layer of a kind, such as ``conv2``."""
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return f"{kind}{self._numbers[kind]}"

    def add(self, layer: Layer, x: Any) -> Any:
        if isinstance(layer, Conv):
            return self._convolution(layer, x, self.name("conv"))
        if isinstance(layer, Pool):
            padding = "same" if layer.ceil else "valid"  # At the end only, where extents are even.
            return layers.MaxPooling2D(layer.kernel, layer.stride, padding)(x)
        if isinstance(layer, LRN):
            return _LRN(layer)(x)
        if isinstance(layer, Inception):
            return self._inception(layer, x, self.name("inception"))
        if isinstance(layer, Mean):
            return layers.GlobalAveragePooling2D()(x)
        if isinstance(layer, Dropout):
            return layers.Dropout(layer.rate)(x)
        x = self.flat(x)
        dense = layers.Dense(layer.units, name=self.name("fc"), **self._start(x.shape[-1]))
        return layers.Activation(self._chain.activation)(dense(x))

    def flat(self, x: Any) -> Any:
        """Flattens the outputs to vectors."""
        return x if len(x.shape) == 2 else layers.Flatten()(x)

    def _convolution(self, layer: Conv, x: Any, name: str) -> Any:
        start = self._start(x.shape[-1] * layer.kernel**2)
        same = layer.stride == 1 and layer.border is None
        if not same:  # Keras would put all of the border on one side where the stride is 2.
            x = layers.ZeroPadding2D(layer.padding)(x)
        x = layers.Conv2D(
            layer.channels,
            layer.kernel,
            strides=layer.stride,
            padding="same" if same else "valid",
            use_bias=not layer.batch,
            name=name,
            **start,
        )(x)
        x = batch_norm(f"{name}_norm")(x) if layer.batch else x
        return layers.Activation(self._chain.activation)(x)

    def _inception(self, layer: Inception, x: Any, name: str) -> Any:
        made = [x, x, x, layers.MaxPooling2D(3, 1, "same")(x)]
        for number, branch in enumerate(layer.branches):
            for depth, convolution in enumerate(branch):
                made[number] = self._convolution(
                    convolution, made[number], f"{name}_{number}_{depth}"
                )
        return layers.Concatenate()(made)

    def _start(self, fan_in: int) -> dict[str, Any]:
        """Keyword arguments of a layer: the initializers of its kernel and its biases."""
        deviation, chosen = self._chain.deviation(fan_in), uniform(fan_in)
        if deviation is not None:
            chosen["kernel_initializer"] = initializers.RandomNormal(stddev=deviation)
        return chosen


class _LRN(layers.Layer):
    """Local response normalization, which Keras has no layer for."""

    def __init__(self, spec: LRN) -> None:
        super().__init__()
        self._spec = spec

    def call(self, x: Any) -> Any:
        spec = self._spec
        return tf.nn.local_response_normalization(x, spec.size // 2, spec.bias, spec.scale, 0.75)
