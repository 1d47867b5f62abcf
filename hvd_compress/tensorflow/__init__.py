"""Compressors for ``horovod.tensorflow``, in ``tf.function`` and eagerly.

Pass one as ``compression=`` to ``hvd.DistributedGradientTape``; Horovod itself stays as it is.
"""

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.tensorflow.auto import Auto
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.schemes import (
    BF16,
    ECQ,
    FP16,
    QSGD,
    Compression,
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
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "Ternary",
]
