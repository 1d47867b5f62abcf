"""The table that every codec joins by one row: contract, parity and golden tests run over all of it."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
    TopK,
)


@dataclass(frozen=True)
class Row:
    """A configuration under test.

    Attributes:
        name: the name of the tests and of the golden file.
        codec: the configuration.
        config_hash: the hash that payloads contain, which must never change.
        feedback: coefficients within the codec's stability bound for buckets of any size up to 4,096.
        whole: whether one non-finite number makes the whole tensor non-finite, not only its group.
        floor: the largest error of a codec that cannot send zero; 0 for the others.
    """

    name: str
    codec: Codec
    config_hash: int
    feedback: ErrorFeedback
    whole: bool = False
    floor: float = 0.0

    @property
    def group(self) -> int | str | None:
        """Elements that share a scale: a size, a word, or None where there is no scale."""
        names = ("group", "bucket", "chunk")
        return next(
            (getattr(self.codec, name) for name in names if hasattr(self.codec, name)), None
        )

    @property
    def unbiased(self) -> bool:
        """Whether the codec rounds at random."""
        return self.codec.error == "unbiased"

    def __str__(self) -> str:
        return self.name


FULL = ErrorFeedback(1.0, 1.0)
DECAYING = ErrorFeedback(0.75, 0.9)
WEAK = ErrorFeedback(0.01, 1.0)

ROWS = (
    Row("onebit", OneBit(), 0xD316BA94, FULL),
    Row("onebit-64", OneBit(64), 0x48ED4D4B, DECAYING),
    Row("onebit-tensor", OneBit("tensor"), 0x5F4EECCC, FULL, whole=True),
    Row("onebit-row", OneBit("row"), 0x31A6FC2B, DECAYING, whole=True),
    Row("onebit-column", OneBit("column"), 0xE7A5AFDF, FULL, whole=True),
    Row("int8-dynamic", Int8(), 0x625C9DCC, FULL),
    Row("int8-dynamic-64", Int8("dynamic", 64), 0x8D62A4F7, DECAYING),
    Row("int8-dynamic-tensor", Int8("dynamic", "tensor"), 0x3B9CA47E, DECAYING, whole=True),
    Row("int8-linear", Int8("linear"), 0xEF4806C8, DECAYING),
    Row("int8-linear-192", Int8("linear", 192), 0x814862BD, FULL),
    Row("int8-linear-tensor", Int8("linear", "tensor"), 0x774532C4, FULL, whole=True),
    Row("int8-static", Int8("static"), 0xCB7CEF30, FULL, floor=1.3e-7),
    Row("int8-static-64", Int8("static", 64, 2), 0x7AA0E9D0, DECAYING, floor=1.3e-6),
    Row("int8-mantissa", Int8("mantissa"), 0x8A90F023, DECAYING),
    Row("int8-mantissa-tensor", Int8("mantissa", "tensor", -3), 0x30867196, FULL, whole=True),
    Row("int8-e4m3", Int8("e4m3"), 0xB755AB40, FULL),
    Row("int8-e4m3-tensor", Int8("e4m3", "tensor"), 0x551FEC1F, DECAYING, whole=True),
    Row("int8-e5m2-64", Int8("e5m2", 64), 0x039EB4AD, FULL),
    Row("ternary", Ternary(), 0x16A561D0, WEAK),
    Row("ternary-64", Ternary(64, clip=None), 0x44AFDBEA, WEAK),
    Row("ternary-192", Ternary(192, clip=1.0), 0x72832019, WEAK),
    Row("ternary-tensor", Ternary("tensor"), 0xADE60D91, WEAK, whole=True),
    Row("ecq", ECQ(4, "l2", 4096), 0x86027EF8, WEAK),
    Row("ecq-default", ECQ(bucket=4096), 0x61F8A2BF, WEAK),
    Row("ecq-64", ECQ(1, "linf", 64), 0x9B629586, ErrorFeedback(0.2, 0.9)),
    Row("ecq-fine", ECQ(127, "l2", 128), 0x7ED9DE37, FULL),
    Row("ecq-tensor", ECQ(7, "l2", "tensor"), 0x11272207, WEAK, whole=True),
    Row("ecq-linf-tensor", ECQ(2, "linf", "tensor"), 0xD1825BF8, WEAK, whole=True),
    Row("ecq-entropy", ECQ(4, "l2", 4096, "entropy"), 0xC2CB8573, WEAK),
    Row("ecq-entropy-64", ECQ(7, "linf", 64, "entropy"), 0x3414EC73, WEAK),
    Row("ecq-entropy-tensor", ECQ(127, "linf", "tensor", "entropy"), 0x45D4708A, WEAK, whole=True),
    Row("ecq-rotated", ECQ(bucket=4096, rotate=True), 0x8F828B90, WEAK),
    Row("ecq-rotated-64", ECQ(1, bucket=64, rotate=True), 0xD7760708, ErrorFeedback(0.2, 0.9)),
    Row(
        "ecq-rotated-entropy",
        ECQ(127, bucket=1024, coding="entropy", rotate=True),
        0x2CD066FB,
        FULL,
    ),
    Row("ternary-entropy", Ternary(coding="entropy"), 0xE0B9E06C, WEAK),
    Row("topk", TopK(), 0x331A62AB, FULL),
    Row("topk-64", TopK(64, 5, 1), 0xD6FD4BC9, DECAYING),
    Row("topk-dense", TopK(192, 192, 8), 0xE76BEAAE, FULL),
    Row("topk-float", TopK(1024, 100, 32), 0x1B03AE96, DECAYING),
    Row("fp16", FP16(), 0x526E7D04, FULL),
    Row("bf16", BF16(), 0x0EE4FD6A, DECAYING),
    Row("bf16-stochastic", BF16("stochastic"), 0xAF598DCF, FULL),
    Row("none", NoCompression(), 0x98ACEC5C, FULL),
)
"""A new codec adds its row here and a golden file (``python -m tests.golden.make``)."""

FEW = tuple(
    row
    for row in ROWS
    if row.name
    in (
        *("onebit", "onebit-column", "int8-dynamic", "int8-linear", "ternary", "ecq"),
        *("ecq-entropy", "ecq-rotated", "topk", "fp16", "bf16", "bf16-stochastic", "none"),
    )
)
"""A row for each way to scale and to pack."""
