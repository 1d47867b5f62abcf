"""The reduction that Horovod was asked for, read while tracing from the operation that performs it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.slots import Slot


def scale_of(reduction: Any, slot: Slot, process_set: Any, ranks: int) -> float:
    """The factor by which Horovod's reduction multiplies the sum of the ranks' gradients.

    Args:
        reduction: the operation that Horovod traced.
        slot: the slot of the gradient.
        process_set: the compressor's process set.
        ranks: the number of ranks in it.

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
    factors: float = reduction.get_attr("prescale_factor") * reduction.get_attr("postscale_factor")
    return factors / ranks if operation == hvd.Average else factors
