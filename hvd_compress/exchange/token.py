"""What Horovod reduces in the place of a compressed gradient.

Horovod's optimizers allreduce whatever a compressor returns. Packed bits cannot be added, so they are
gathered, and Horovod gets a token: ``[1, r + 1, (r + 1)^2]`` on rank ``r``. What it becomes tells the
operation that the user asked for and how many ranks took part, before anything waits for a gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.exchange.errors import ExchangeError

LENGTH = 3
_TOLERANCE = 1e-4
"""Far above the rounding of float32 sums and predivide factors, below 1 / (number of ranks)^2."""


def make(rank: int) -> list[float]:
    """The token of one rank, to be sent in float32 (sums of ones stall in half precision)."""
    return [1.0, rank + 1.0, (rank + 1.0) ** 2]


def reduction_scale(reduced: Sequence[float], size: int, name: str) -> float:
    """The factor on the sum of all ranks' gradients that Horovod's operation stands for.

    Args:
        reduced: the token after Horovod's allreduce, its scaling included.
        size: ranks of the compressor's process set.
        name: the tensor's name, for the message.

    Returns:
        ``1 / size`` for Average, with predivide factors or without, and ``1`` for Sum.

    Raises:
        ExchangeError: Min, Max, Product, Adasum, a rank that has joined, another process set.
    """
    ones, ranks, squares = reduced
    expected_ranks = (size + 1) / 2
    expected_squares = (size + 1) * (2 * size + 1) / 6
    if _close(ranks, ones * expected_ranks) and _close(squares, ones * expected_squares):
        if _close(ones, 1.0):
            return 1.0 / size
        if _close(ones, float(size)):
            return 1.0
    raise ExchangeError(
        f"{name}: expected every one of {size} ranks to take part in op=Average or op=Sum; Horovod's "
        f"reduction of [1, r + 1, (r + 1)^2] gave {[round(value, 4) for value in reduced]}. Compressed "
        f"gradients cannot be reduced with Min, Max, Product or Adasum, nor after a rank has called "
        f"hvd.join(), and the compressor's process_set must be the optimizer's."
    )


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _TOLERANCE * abs(expected)
