"""ResNets (He et al., "Deep residual learning for image recognition", 2016): CIFAR-10's, and ResNet-50."""

from __future__ import annotations

import keras
from keras import initializers, layers, ops

from benchmarks.models.tensorflow.layers import batch_norm, linear


def of_cifar(depth: int, classes: int) -> keras.Model:
    """Section 4.2: 32x32 images, three stages of n basic blocks, 16, 32 and 64 channels; depth 6 n + 2."""
    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(_conv_bn(images, 16))
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(depth // 6):
            x = _basic_block(x, width, stride if block == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, linear(classes, 64, name="fc")(x), name=f"resnet{depth}")


def resnet50(classes: int) -> keras.Model:
    """Table 1, as ``keras.applications`` has it, for 224x224 images.

    Two things differ from torch's ResNet-50: the convolutions have biases, 26,560 more numbers than others
    count, and where a stage begins the stride is the first 1x1 convolution's, as in the paper.
    """
    base = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=(224, 224, 3), pooling="avg"
    )
    return keras.Model(base.input, linear(classes, 2048, name="fc")(base.output), name="resnet50")


def _basic_block(x: keras.KerasTensor, width: int, stride: int) -> keras.KerasTensor:
    """Two 3x3 convolutions; where the shape changes the shortcut subsamples and pads (option A)."""
    shortcut = x[:, ::stride, ::stride, :]
    shortcut = ops.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[-1])))
    y = layers.ReLU()(_conv_bn(x, width, stride))
    return layers.ReLU()(_conv_bn(y, width) + shortcut)


def _conv_bn(x: keras.KerasTensor, width: int, stride: int = 1) -> keras.KerasTensor:
    # "same" would put all of the border on one side where the stride is 2.
    x = layers.ZeroPadding2D(1)(x)
    he_fan_out = initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
    x = layers.Conv2D(width, 3, strides=stride, use_bias=False, kernel_initializer=he_fan_out)(x)
    return batch_norm()(x)
