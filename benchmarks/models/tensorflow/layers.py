"""Layers that begin with weights from the same distributions as torch's.

Keras's own defaults would do, but recipes and figures are then those of other models: where weights start
decides how much of a small data set is learnt in so many steps.
"""

from __future__ import annotations

import math

from keras import initializers, layers


def linear(units: int, inputs: int, *, name: str, activation: str | None = None) -> layers.Layer:
    """A fully connected layer with biases."""
    return layers.Dense(units, name=name, activation=activation, **uniform(inputs))


def uniform(fan_in: int) -> dict[str, initializers.Initializer]:
    """Keyword arguments of a Keras layer: initializers of its kernels and biases."""
    bound = 1 / math.sqrt(fan_in)
    return {
        f"{what}_initializer": initializers.RandomUniform(-bound, bound)
        for what in ("kernel", "bias")
    }


def batch_norm(name: str | None = None) -> layers.Layer:
    """Batch normalization with torch's constants."""
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)
