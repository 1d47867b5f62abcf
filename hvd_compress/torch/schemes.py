"""The compressors by name: each codec of the papers with the error feedback that its paper gives it."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.codecs import SCHEMES, ErrorFeedback
from hvd_compress.codecs.base import check_choice
from hvd_compress.torch.compressor import Compressor, NamedParameters


class _Scheme(Compressor):
    """A compressor for one entry of :data:`hvd_compress.codecs.SCHEMES`.

    Takes the codec's fields and ``alpha`` and ``beta`` as keywords, beside :class:`Compressor`'s own.
    """

    scheme: str

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Any,
    ) -> None:
        scheme = SCHEMES[self.scheme]
        fields = {field.name for field in dataclasses.fields(scheme.codec)}
        codec = scheme.codec(**{name: options.pop(name) for name in fields & options.keys()})
        feedback = ErrorFeedback(
            scheme.feedback.alpha if alpha is None else alpha,
            scheme.feedback.beta if beta is None else beta,
        )
        super().__init__(named_parameters, codec, feedback, **options)


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


_BY_NAME = {cls.scheme: cls for cls in _Scheme.__subclasses__()}


def _class_of(name: str) -> type[_Scheme]:
    # A registered scheme works by its name before it has a documented class here.
    if name not in _BY_NAME:
        _BY_NAME[name] = type(name, (_Scheme,), {"scheme": name})
    return _BY_NAME[name]


class Compression:
    """Compressors by name, for command-line flags."""

    names = tuple(SCHEMES)

    @staticmethod
    def by_name(name: str, named_parameters: NamedParameters, **options: Any) -> Compressor:
        """Makes the compressor of that name; options are the class's keywords.

        Raises:
            ValueError: no such name.
        """
        check_choice("Compression", "by_name", name, tuple(SCHEMES))
        return _class_of(name)(named_parameters, **options)
