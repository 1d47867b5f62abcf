"""Every codec and every named scheme: a codec with the error feedback that its paper gives it.

Adding a codec takes its file, its line in :data:`SCHEMES`, and a row in the tests' table: the frontends
make their classes from it (:mod:`hvd_compress.codecs.frontends`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.codecs.base import Codec, check_choice
from hvd_compress.codecs.cast import BF16, FP16, NoCompression
from hvd_compress.codecs.ecq import ECQ
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.int8 import Int8
from hvd_compress.codecs.onebit import OneBit
from hvd_compress.codecs.ternary import Ternary

OFF = ErrorFeedback(alpha=0.0)


@dataclass(frozen=True)
class Scheme:
    """A codec class and the feedback coefficients that its paper uses.

    Attributes:
        codec: the codec's class.
        feedback: its paper's coefficients.
        summary: the first line of the docstring of the frontends' class; empty is the codec's own.
        title: the name of the frontends' class; empty is the codec's own.
    """

    codec: type[Codec]
    feedback: ErrorFeedback
    summary: str = ""
    title: str = ""


SCHEMES: dict[str, Scheme] = {
    "onebit": Scheme(OneBit, ErrorFeedback(1.0, 1.0), "1-bit SGD with error feedback."),
    "int8": Scheme(Int8, OFF, "8-bit data types."),
    "ternary": Scheme(Ternary, OFF, "TernGrad."),
    "ecq": Scheme(ECQ, ErrorFeedback(0.01, 1.0), "ECQ-SGD, quantization with error feedback."),
    "qsgd": Scheme(ECQ, OFF, "QSGD: ECQ without error feedback.", title="QSGD"),
    "fp16": Scheme(FP16, OFF, "Half precision, added in half precision by an allreduce."),
    "bf16": Scheme(BF16, OFF, "bfloat16, gathered and added in float32."),
    "none": Scheme(NoCompression, OFF, "Gradients as they are, with the counters of the others."),
}
"""What command lines and compressors call by name."""

CODECS: dict[str, type[Codec]] = {scheme.codec.name: scheme.codec for scheme in SCHEMES.values()}
"""Codec classes by the name that stands in configurations."""


def scheme_of(codec: Codec) -> Scheme:
    """The first scheme with that codec, for its paper's feedback; without any where none has it."""
    matching = (scheme for scheme in SCHEMES.values() if isinstance(codec, scheme.codec))
    return next(matching, Scheme(type(codec), OFF))


def codec_from_config(config: dict[str, Any]) -> Codec:
    """The inverse of :meth:`Codec.to_config`.

    Raises:
        ValueError: an unknown codec, or fields out of range.
        TypeError: fields that the codec does not have.
    """
    fields = dict(config)
    name = fields.pop("codec", None)
    check_choice("configuration", "codec", name, tuple(CODECS))
    return CODECS[name](**fields)
