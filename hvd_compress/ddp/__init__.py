"""Compressors for PyTorch's ``DistributedDataParallel``, as communication hooks.

Needs no Horovod: ``model.register_comm_hook(compressor, hvd_compress.ddp.hook)``.
"""

from hvd_compress.codecs import ErrorFeedback, PayloadError
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.ddp.hook import hook
from hvd_compress.ddp.schemes import (
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
from hvd_compress.exchange.errors import ExchangeError

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "PayloadError",
    "Ternary",
    "hook",
]
