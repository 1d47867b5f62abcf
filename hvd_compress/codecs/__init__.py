"""Codecs, which decide what is sent: frozen configurations, byte layouts and NumPy references.

Nothing here depends on a framework, a network or a thread.
"""

from hvd_compress.codecs.base import HEADER_BYTES, Codec, PayloadError, PayloadLayout
from hvd_compress.codecs.cast import BF16, FP16, NoCompression
from hvd_compress.codecs.ecq import ECQ, QSGD
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.int8 import Int8
from hvd_compress.codecs.levels import LevelCodec
from hvd_compress.codecs.noise import NoiseKey
from hvd_compress.codecs.onebit import OneBit
from hvd_compress.codecs.payload import Header, payload_length, read_header
from hvd_compress.codecs.power_sgd import PowerSGD
from hvd_compress.codecs.registry import (
    CODECS,
    codec_class,
    codec_from_config,
    codec_names,
    register,
)
from hvd_compress.codecs.ternary import Ternary
from hvd_compress.codecs.topk import TopK

__all__ = [
    "BF16",
    "CODECS",
    "ECQ",
    "FP16",
    "HEADER_BYTES",
    "QSGD",
    "Codec",
    "ErrorFeedback",
    "Header",
    "Int8",
    "LevelCodec",
    "NoCompression",
    "NoiseKey",
    "OneBit",
    "PayloadError",
    "PayloadLayout",
    "PowerSGD",
    "Ternary",
    "TopK",
    "codec_class",
    "codec_from_config",
    "codec_names",
    "payload_length",
    "read_header",
    "register",
]
