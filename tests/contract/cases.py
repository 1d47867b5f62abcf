"""Tensors, their gradients, and codecs for each exchange, with which the contract is tried."""

from __future__ import annotations

import numpy as np

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    OneBit,
    PowerSGD,
    Ternary,
    TopK,
)
from tests import device

Row = tuple[Codec, ErrorFeedback] | tuple[Codec, ErrorFeedback, Codec]
"""A codec, its feedback, and the codec within hosts, if there is one."""

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
"""7, 3 and 1 grains: uneven parts, ranks without one, and tensors smaller than the number of ranks."""

FULL, NONE, WEAK = ErrorFeedback(), ErrorFeedback(0.0), ErrorFeedback(0.01, 1.0)
PARTIAL = ErrorFeedback(0.5, 0.75)

_PAYLOADS: list[Row] = [
    (OneBit(), FULL),
    (OneBit(), NONE),
    (OneBit("tensor"), PARTIAL),
    (OneBit("column"), FULL),
    (OneBit("row"), PARTIAL),
    (Int8(), NONE),
    (Int8("linear"), FULL),
    (Ternary(), NONE),
    (Ternary(bucket="tensor"), NONE),
    (ECQ(), WEAK),
    (ECQ(coding="entropy"), WEAK),
    (ECQ(bucket=1024, rotate=True), WEAK),
    (Ternary(coding="entropy"), NONE),
    (TopK(256, 24, 2), FULL),
    (BF16(), NONE),
    (FP16(), FULL),
]
_LEVELS: list[Row] = [
    (Ternary(), NONE),
    (Ternary(bucket="tensor", clip=None), NONE),
    (Ternary(64), ErrorFeedback(0.1, 0.9)),
    (ECQ(), WEAK),
    (ECQ(2, "linf", "tensor"), NONE),
    (ECQ(3, bucket=256, rotate=True), ErrorFeedback(0.1, 0.9)),
    (ECQ(100, "l2", 128), FULL),
]
ROWS: dict[str, list[Row]] = {
    "allgather": [*_PAYLOADS[:-1], (ECQ(), NONE)],
    "two_shot": _PAYLOADS,
    "hierarchical": [
        *_PAYLOADS,
        (OneBit(), FULL, Int8()),
        (OneBit("column"), PARTIAL, BF16("stochastic")),
        (ECQ(7, coding="entropy"), WEAK, ECQ(127)),
        (Int8(), NONE, Int8("e4m3", 64)),
    ],
    "integer_sum": _LEVELS,
    "low_rank": [(PowerSGD(2), FULL), (PowerSGD(1), NONE), (PowerSGD(7), PARTIAL)],
}
"""The codecs with which each exchange is tried. FP16 in an allgather is Horovod's or DDP's own."""

if device.TYPE != "cpu":  # The entropy code and sums of integers have kernels for CPUs only.
    del ROWS["integer_sum"]
    ROWS = {name: [row for row in rows if not row[0].varies] for name, rows in ROWS.items()}

FLAT = tuple(name for name in ROWS if name != "hierarchical")
"""The exchanges of ranks whose hosts do not matter."""

USUAL: dict[str, Row] = {name: (OneBit(), FULL) for name in ROWS} | {
    "integer_sum": (ECQ(), WEAK),
    "low_rank": (PowerSGD(2), FULL),
}
"""The codec with which each exchange is tried where the codec does not matter."""


def gradients(rank: int, step: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns one rank's gradients at one step, float32; every rank computes the same ones.

    Those of odd ranks are larger from step to step: by 10, which a sum of integers with common norms has
    to bear.
    """
    generator = np.random.default_rng([rank, step])
    factor = np.float32(10.0 ** (step % 3 * (rank % 2)))
    return {
        name: np.asarray(factor * generator.standard_normal(shape, np.float32))
        for name, shape in shapes.items()
    }
