"""Compressors for ``horovod.torch``.

Pass one as ``compression=`` to ``hvd.DistributedOptimizer``; Horovod itself stays as it is.
"""

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.torch.auto import Auto
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.owner_steps import AdaGrad, OwnerStep
from hvd_compress.torch.schemes import (
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
    "AdaGrad",
    "Auto",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "OwnerStep",
    "PayloadError",
    "Ternary",
]
