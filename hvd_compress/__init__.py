"""Gradient compression for data-parallel training: the codecs, which every frontend accepts as values.

The frontends are separate packages: ``hvd_compress.torch``, ``.tensorflow`` and ``.keras`` for Horovod;
``hvd_compress.ddp``, ``.fsdp`` and ``.distributed`` for PyTorch alone. This package imports no framework.
"""

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    QSGD,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    PayloadError,
    PowerSGD,
    Ternary,
    TopK,
)
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "ECQ",
    "FP16",
    "QSGD",
    "ErrorFeedback",
    "ExchangeError",
    "Int8",
    "NoCompression",
    "OneBit",
    "PayloadError",
    "PowerSGD",
    "Route",
    "Ternary",
    "TopK",
]
