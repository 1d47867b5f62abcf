"""The compressors by name: each codec of the papers with the error feedback that its paper gives it."""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs import SCHEMES
from hvd_compress.codecs.schemes import Scheme, class_of
from hvd_compress.tensorflow.auto import Auto
from hvd_compress.tensorflow.compressor import Compressor


class _Scheme(Scheme, Compressor):
    """A compressor for one entry of :data:`hvd_compress.codecs.SCHEMES`."""


class OneBit(_Scheme):
    """1-bit SGD with error feedback; fields of :class:`hvd_compress.codecs.OneBit`."""

    scheme = "onebit"


class Int8(_Scheme):
    """8-bit data types; fields of :class:`hvd_compress.codecs.Int8`."""

    scheme = "int8"


class Ternary(_Scheme):
    """TernGrad; fields of :class:`hvd_compress.codecs.Ternary`."""

    scheme = "ternary"


class ECQ(_Scheme):
    """ECQ-SGD; fields of :class:`hvd_compress.codecs.ECQ`."""

    scheme = "ecq"


class QSGD(_Scheme):
    """QSGD: :class:`ECQ` without error feedback."""

    scheme = "qsgd"


class FP16(_Scheme):
    """Half precision, added by Horovod's own allreduce."""

    scheme = "fp16"


class BF16(_Scheme):
    """bfloat16; Horovod cannot add it, so it is gathered."""

    scheme = "bf16"


class NoCompression(_Scheme):
    """float32 as it is, with the counters of the others."""

    scheme = "none"


class Compression:
    """Compressors by name, for command-line flags: those of :attr:`names`, and ``"auto"``."""

    names = tuple(SCHEMES)

    @staticmethod
    def by_name(name: str, /, **options: Any) -> Compressor:
        """Makes the compressor of that name, or :class:`Auto`; options are the class's keywords.

        Raises:
            ValueError: no such name.
        """
        if name == "auto":
            return Auto(**options)
        return class_of(name, _Scheme)(**options)
