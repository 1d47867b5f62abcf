"""Horovod for Keras 3, on its TensorFlow backend, with compressed gradients or without.

Horovod's own ``horovod.tensorflow.keras.DistributedOptimizer`` overrides methods that Keras 3 never calls,
so that the ranks train apart. :func:`DistributedOptimizer` is one that Keras 3 calls.
"""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"hvd_compress.keras: expected Keras's TensorFlow backend, got {keras.backend.backend()}: set "
        f"KERAS_BACKEND=tensorflow, or train a PyTorch model with hvd_compress.torch"
    )

from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.keras.callbacks import BroadcastVariables, CompareWeights
from hvd_compress.keras.optimizer import DistributedOptimizer
from hvd_compress.keras.saving import load_model
from hvd_compress.tensorflow import (
    BF16,
    ECQ,
    FP16,
    QSGD,
    Auto,
    Compression,
    Compressor,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
)

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "Auto",
    "BroadcastVariables",
    "CompareWeights",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "Ternary",
    "load_model",
]
