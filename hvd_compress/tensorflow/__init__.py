"""Compressors for ``horovod.tensorflow``, in ``tf.function`` and eagerly.

Pass one as ``compression=`` to ``hvd.DistributedGradientTape``; Horovod itself is not changed.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.auto import Auto
from hvd_compress.tensorflow.collectives import join
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.named import (
    BF16,
    ECQ,
    FP16,
    QSGD,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
    TopK,
)

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "Ternary",
    "TopK",
    "join",
]
