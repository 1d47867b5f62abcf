"""What Horovod was asked to do with gradients, read while tracing from the operation that does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.slots import Slot


@dataclass(frozen=True)
class Asked:
    """An average or a sum.

    Attributes:
        operation: ``hvd.Average`` or ``hvd.Sum``.
        prescale: factor on each rank's gradient.
        postscale: factor on the result.
    """

    operation: Any
    prescale: float
    postscale: float

    def scale(self, ranks: int) -> float:
        """The factor on the sum of so many ranks' gradients that this stands for."""
        factors = self.prescale * self.postscale
        return factors / ranks if self.operation == hvd.Average else factors


def asked_for(reduction: Any, slot: Slot, process_set: Any) -> Asked:
    """What a gradient's reduction is.

    Args:
        reduction: the operation that Horovod traced.
        slot: whose gradient.
        process_set: the compressor's.

    Raises:
        ExchangeError: an operation that compressed gradients cannot follow, or another process set.
    """
    if reduction.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
        raise ExchangeError(
            f"{slot.label}: expected Horovod's allreduce of the token, got {reduction.type}"
        )
    operation, number = (reduction.get_attr(name) for name in ("reduce_op", "process_set_id"))
    if operation not in (hvd.Average, hvd.Sum):
        raise ExchangeError(
            f"{slot.label}: expected op=Average or op=Sum, got another: compressed gradients cannot be "
            f"reduced with Min, Max, Product or Adasum"
        )
    expected = process_set.process_set_id
    if number != expected:
        raise ExchangeError(
            f"{slot.label}: expected the compressor's process set {expected}, got "
            f"{number}: pass the same process_set to both"
        )
    prescale, postscale = (
        reduction.get_attr(name) for name in ("prescale_factor", "postscale_factor")
    )
    return Asked(operation, prescale, postscale)
