"""1-bit SGD's quantizer (Seide et al., 2014, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np

from hvd_compress.codecs import base, checks, packing
from hvd_compress.codecs.feedback import ErrorFeedback
from hvd_compress.codecs.noise import NoiseKey
from hvd_compress.codecs.sums import column_sum, lane_sum

_GROUPINGS = {"tensor": 1, "row": 2, "column": 3}


@dataclass(frozen=True)
class OneBit(base.Codec):
    """One bit per element: the side of zero on which it lies.

    Each group sends two reconstruction values, the means of its elements on either side of the
    threshold 0, which minimise the squared error (section 3). Zeros count as positive.

    Attributes:
        group: the number of contiguous elements that share two values, a multiple of 64, or
            ``"tensor"``, ``"row"`` or ``"column"`` (the paper's choice). Rows and columns are those of
            ``reshape(shape[0], -1)``.
    """

    codec_id: ClassVar[int] = 1
    name: ClassVar[str] = "onebit"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"
    feedback: ClassVar[ErrorFeedback] = ErrorFeedback(1.0, 1.0)

    group: int | Literal["tensor", "row", "column"] = 1024

    def __post_init__(self) -> None:
        checks.check_group("OneBit", "group", self.group, tuple(_GROUPINGS))

    @property
    def shaped(self) -> bool:
        """Whether the groups are rows or columns."""
        return self.group in ("row", "column")

    def by_rows(self) -> tuple[OneBit, bool]:
        """The codec for rows, and whether groups are columns, which are rows of the transposed matrix."""
        return OneBit("row"), self.group == "column"

    def layout(self, shape: base.Shape) -> base.PayloadLayout:
        """The layout: the lower values of all groups, the upper values of all groups, one bit plane."""
        rows, columns = base.as_matrix(shape)
        count = rows * columns
        block = self.group if isinstance(self.group, int) else base.PACK_BLOCK
        groups = {"row": rows, "column": columns, "tensor": 1}.get(
            str(self.group), -(-count // block)
        )
        last = count % block or block
        return base.PayloadLayout(
            count=count,
            scales=2 * groups if count else 0,
            block=block,
            block_bytes=packing.plane_bytes(block, 1),
            last_bytes=packing.plane_bytes(last, 1),
        )

    def quantize(
        self, x: np.ndarray, shape: base.Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the means on either side of zero, and the bits (1: not below zero)."""
        upper_side = x >= 0
        zero = np.float32(0)
        finite = self._per_group(np.isfinite(x), shape, np.all)
        side_means = []
        for side in (~upper_side, upper_side):
            total = self._sums(np.where(side, x, zero), shape)
            count = self._per_group(side, shape, np.sum)
            with np.errstate(all="ignore"):
                mean = np.where(count > 0, total / np.maximum(count, 1).astype(np.float32), zero)
            side_means.append(mean.astype(np.float32))
            finite = finite & np.isfinite(mean)
        if not isinstance(self.group, int):
            finite[:] = finite.all()
        scales = np.concatenate([np.where(finite, m, np.float32(np.nan)) for m in side_means])
        bits = upper_side & self._spread(finite, shape)
        return scales, packing.pack_planes(bits.astype(np.uint8), 1)

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: base.Shape) -> np.ndarray:
        """Takes the group's lower value where the bit is 0, and the upper one where the bit is 1."""
        lower, upper = (self._spread(half, shape) for half in scales.reshape(2, -1))
        bits = packing.unpack_planes(codes, lower.size, 1)
        return np.where(bits == 1, upper, lower)

    def native(self) -> dict[str, int | float]:
        """The C interface's ``grouping`` and ``group``."""
        if isinstance(self.group, int):
            return {"grouping": 0, "group": self.group}
        return {"grouping": _GROUPINGS[self.group]}

    def _sums(self, x: np.ndarray, shape: base.Shape) -> np.ndarray:
        matrix = x.reshape(base.as_matrix(shape))
        if self.group == "column":
            return column_sum(matrix)
        return lane_sum(matrix if self.group == "row" else base.by_group(x, self.group))

    def _per_group(
        self, x: np.ndarray, shape: base.Shape, reduce: Callable[..., np.ndarray]
    ) -> np.ndarray:
        matrix = x.reshape(base.as_matrix(shape))
        if self.group in ("row", "column"):
            return reduce(matrix, axis=1 if self.group == "row" else 0)
        return np.array([reduce(part) for part in base.groups_of(x, cast(base.Group, self.group))])

    def _spread(self, per_group: np.ndarray, shape: base.Shape) -> np.ndarray:
        rows, columns = base.as_matrix(shape)
        if self.group == "row":
            return np.repeat(per_group, columns)
        if self.group == "column":
            return np.tile(per_group, rows)
        return base.spread(per_group, rows * columns, self.group)
