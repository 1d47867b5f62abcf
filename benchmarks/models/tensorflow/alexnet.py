"""AlexNet in one tower (Krizhevsky, "One weird trick for parallelizing CNNs", 2014)."""

from __future__ import annotations

import keras
from keras import layers

from benchmarks.models.tensorflow.layers import convolution, linear


def alexnet(classes: int) -> keras.Model:
    """Five convolutions and three wide layers, which hold 96% of its 61 million parameters.

    From images, shape=(n, 224, 224, 3), to logits, shape=(n, classes).
    """
    images = keras.Input((224, 224, 3))
    x = convolution(64, 11, 3, strides=4, name="conv1")(layers.ZeroPadding2D(2)(images))
    x = layers.MaxPooling2D(3, 2)(x)
    x = convolution(192, 5, 64, padding="same", name="conv2")(x)
    x = layers.MaxPooling2D(3, 2)(x)
    x = convolution(384, 3, 192, padding="same", name="conv3")(x)
    x = convolution(256, 3, 384, padding="same", name="conv4")(x)
    x = convolution(256, 3, 256, padding="same", name="conv5")(x)
    x = layers.Flatten()(layers.MaxPooling2D(3, 2)(x))
    x = linear(4096, 256 * 6 * 6, name="fc1", activation="relu")(layers.Dropout(0.5)(x))
    x = linear(4096, 4096, name="fc2", activation="relu")(layers.Dropout(0.5)(x))
    return keras.Model(images, linear(classes, 4096, name="fc3")(x), name="alexnet")
