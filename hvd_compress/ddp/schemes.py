"""The compressors by name: each codec of the papers with the error feedback that its paper gives it."""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs import SCHEMES
from hvd_compress.codecs.schemes import Scheme, class_of
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.torch_common.slots import NamedParameters


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
    """Half precision, added by an allreduce, as PyTorch's ``fp16_compress_hook`` does it."""

    scheme = "fp16"


class BF16(_Scheme):
    """bfloat16, gathered and added in float32."""

    scheme = "bf16"


class NoCompression(_Scheme):
    """Gradients as they are, as PyTorch's ``allreduce_hook`` does it, with the counters of the others."""

    scheme = "none"


class Compression:
    """Compressors by name, for command-line flags."""

    names = tuple(SCHEMES)

    @staticmethod
    def by_name(name: str, named_parameters: NamedParameters, /, **options: Any) -> Compressor:
        """Makes the compressor of that name; options are the class's keywords.

        Raises:
            ValueError: no such name.
        """
        return class_of(name, _Scheme)(named_parameters, **options)
