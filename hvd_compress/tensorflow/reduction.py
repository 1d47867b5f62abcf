"""The reduction that Horovod was asked for, read while tracing from the operation that performs it."""

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
        prescale: the factor on each rank's gradient.
        postscale: the factor on the result.
    """

    operation: Any
    prescale: float
    postscale: float

    def scale(self, ranks: int) -> float:
        """The factor by which to multiply the sum of the gradients of ``ranks`` ranks."""
        factors = self.prescale * self.postscale
        return factors / ranks if self.operation == hvd.Average else factors


def asked_for(reduction: Any, slot: Slot, process_set: Any) -> Asked:
    """The reduction that Horovod performs on a gradient.

    Args:
        reduction: the operation that Horovod traced.
        slot: the slot of the gradient.
        process_set: the compressor's process set.

    Raises:
        ExchangeError: the operation is not possible on compressed gradients, or has another process set.
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
