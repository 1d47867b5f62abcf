"""Every codec by name.

To add a codec: its file, its line in :data:`CODECS`, and a row in the tests' table.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.cast import BF16, FP16, NoCompression
from hvd_compress.codecs.checks import check_choice
from hvd_compress.codecs.ecq import ECQ, QSGD
from hvd_compress.codecs.int8 import Int8
from hvd_compress.codecs.onebit import OneBit
from hvd_compress.codecs.ternary import Ternary

CODECS: dict[str, type[Codec]] = {
    "onebit": OneBit,
    "int8": Int8,
    "ternary": Ternary,
    "ecq": ECQ,
    "qsgd": QSGD,
    "fp16": FP16,
    "bf16": BF16,
    "none": NoCompression,
}
"""Codec classes by the names that command lines, compressors and configurations call them."""


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
