"""The reduction that Horovod was asked for, read while tracing from the operation that performs it."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.tensorflow.slots import GraphSlot


def check_operation(operation: Any) -> None:
    """Raises ``ExchangeError`` for a reduction that is not possible on compressed gradients."""
    others = {getattr(hvd, name): name for name in ("Adasum", "Min", "Max", "Product")}
    if operation not in (hvd.Average, hvd.Sum):
        raise ExchangeError(
            f"expected op=Average or op=Sum with a compressor, got {others.get(operation, operation)}: "
            f"payloads can be added up only; use one of these, or Horovod's own compression"
        )


def scale_of(reduction: Any, slot: GraphSlot, process_set: Any, ranks: int) -> float:
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
    check_operation(operation)
    expected = process_set.process_set_id
    if number != expected:
        raise ExchangeError(
            f"{slot.label}: expected the compressor's process set {expected}, got "
            f"{number}: pass the same process_set to both"
        )
    factors: float = reduction.get_attr("prescale_factor") * reduction.get_attr("postscale_factor")
    return factors / ranks if operation == hvd.Average else factors
