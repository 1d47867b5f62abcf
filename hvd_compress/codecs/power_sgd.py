"""PowerSGD (Vogels, Karimireddy and Jaggi, 2019): matrices of low rank in place of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hvd_compress.codecs import base, checks
from hvd_compress.codecs.feedback import ErrorFeedback

MOST = 1024
"""The largest rank. A step orthogonalizes the factors' columns one after the other."""


@dataclass(frozen=True)
class PowerSGD(base.Codec):
    """The product of two matrices with ``rank`` columns, which approximates a gradient.

    Unlike other codecs, it writes no payloads: its exchange, ``"low_rank"``, adds the factors of all ranks
    up (:mod:`hvd_compress.exchanges.low_rank`). A gradient of more than two dimensions is the matrix
    ``reshape(shape[0], -1)``. Gradients of fewer than two dimensions, and those that are no larger than
    their factors, travel uncompressed. The codec needs error feedback.

    Attributes:
        rank: the number of columns of each factor.
    """

    name: ClassVar[str] = "powersgd"
    error: ClassVar[Literal["unbiased", "contractive"]] = "contractive"
    feedback: ClassVar[ErrorFeedback] = ErrorFeedback(1.0, 1.0)
    exchange: ClassVar[str | None] = "low_rank"

    rank: int = 4

    def __post_init__(self) -> None:
        checks.check_number("PowerSGD", "rank", self.rank, 1, MOST, integer=True)
        checks.store(self, "rank", int(self.rank))

    def encodes(self, shape: base.Shape) -> bool:
        """Whether the factors have fewer elements than the tensor, which has two dimensions or more."""
        rows, columns = base.as_matrix(shape)
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def payload_bytes(self, shape: base.Shape) -> int:
        """The bytes of both factors in float32."""
        return 4 * self.rank * sum(base.as_matrix(shape))
