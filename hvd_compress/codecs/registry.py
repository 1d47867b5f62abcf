"""Every codec and every named scheme: a codec with the error feedback that its paper gives it.

Adding a codec takes its file, its line in :data:`CODECS`, its line in :data:`SCHEMES`, and a row in the
tests' table.
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

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (OneBit, Int8, Ternary, ECQ, FP16, BF16, NoCompression)
}
"""Codec classes by the name that stands in configurations."""

OFF = ErrorFeedback(alpha=0.0)


@dataclass(frozen=True)
class Scheme:
    """A codec class and the feedback coefficients that its paper uses."""

    codec: type[Codec]
    feedback: ErrorFeedback


SCHEMES: dict[str, Scheme] = {
    "onebit": Scheme(OneBit, ErrorFeedback(1.0, 1.0)),
    "int8": Scheme(Int8, OFF),
    "ternary": Scheme(Ternary, OFF),
    "ecq": Scheme(ECQ, ErrorFeedback(0.01, 1.0)),
    "qsgd": Scheme(ECQ, OFF),
    "fp16": Scheme(FP16, OFF),
    "bf16": Scheme(BF16, OFF),
    "none": Scheme(NoCompression, OFF),
}
"""What command lines and compressors call by name."""


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
