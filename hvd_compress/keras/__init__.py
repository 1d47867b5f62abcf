"""Horovod for Keras 3, on its TensorFlow backend, with compressed gradients or without.

Horovod's own ``horovod.tensorflow.keras.DistributedOptimizer`` overrides methods that Keras 3 never calls,
so that the ranks train apart. :func:`DistributedOptimizer` overrides methods that Keras 3 does call.
"""

from hvd_compress.needs import need

need(__name__)

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"hvd_compress.keras: expected Keras's TensorFlow backend, got {keras.backend.backend()}: set "
        f"KERAS_BACKEND=tensorflow, or train a PyTorch model with hvd_compress.torch"
    )

import hvd_compress.tensorflow as _frontend
from hvd_compress.keras.callbacks import (
    BroadcastVariables,
    CompareWeights,
    CompressionMetrics,
    MetricAverage,
)
from hvd_compress.keras.optimizer import DistributedOptimizer, load_model
from hvd_compress.tensorflow import *  # noqa: F403 - OneBit, Int8 and so on, and what goes with them.

__all__ = [
    "BroadcastVariables",
    "CompareWeights",
    "CompressionMetrics",
    "DistributedOptimizer",
    "MetricAverage",
    "load_model",
]
__all__ += _frontend.__all__
