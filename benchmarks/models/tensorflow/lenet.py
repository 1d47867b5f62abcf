"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998)."""

from __future__ import annotations

import keras
from keras import layers

from benchmarks.models.tensorflow.layers import convolution, linear


def lenet(classes: int) -> keras.Model:
    """LeNet-5 as it is taught today: ReLU, max pooling, every map connected to every map.

    From images, shape=(n, 28, 28, 1), to logits, shape=(n, classes). The paper's 32x32 input is a 28x28
    image with a border of two, which the first convolution adds.
    """
    images = keras.Input((28, 28, 1))
    x = convolution(6, 5, 1, padding="same", name="conv1")(images)
    x = layers.MaxPooling2D(2)(x)
    x = convolution(16, 5, 6, name="conv2")(x)
    x = layers.Flatten()(layers.MaxPooling2D(2)(x))
    x = linear(120, 16 * 5 * 5, name="fc1", activation="relu")(x)
    x = linear(84, 120, name="fc2", activation="relu")(x)
    return keras.Model(images, linear(classes, 84, name="fc3")(x), name="lenet")
