"""Compressors for ``horovod.torch``.

Pass one as ``compression=`` to ``hvd.DistributedOptimizer``; Horovod itself is not changed.
"""

from hvd_compress.needs import need

need(__name__)

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.engine.owner_steps import AdaGrad, OwnerStep
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.torch.auto import Auto
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.named import (
    BF16,
    ECQ,
    FP16,
    QSGD,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    Ternary,
    TopK,
)

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "AdaGrad",
    "Auto",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "OwnerStep",
    "PayloadError",
    "PowerSGD",
    "Ternary",
    "TopK",
]
