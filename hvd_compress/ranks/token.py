"""Small sums that tell which ranks take part in a step, and what Horovod was asked to do.

Every rank has the token ``[1, r + 1, (r + 1)^2]``. The sum of the tokens over the ranks at the start of a
step, the *participation check*, tells whether all of them take part: a rank that has called ``hvd.join()``
adds zeros.

Horovod's optimizers allreduce whatever a compressor returns. Packed bits cannot be added, so they are
gathered, and Horovod receives a token instead of the gradient. The reduced token, compared with the
participation check, tells the operation that the user asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.ranks.errors import ExchangeError

TOLERANCE = 1e-4
"""Far above the rounding of float32 sums and predivide factors, below 1 / (number of ranks)^2."""


def make(rank: int) -> list[float]:
    """The token of one rank, to be sent in float32 (sums of ones stall in half precision)."""
    return [1.0, rank + 1.0, (rank + 1.0) ** 2]


def everybody(participants: Sequence[float], size: int) -> bool:
    """Whether a participation check, the sum of the tokens, counted all ``size`` ranks.

    No proper subset of the ranks has the same sums as all of them.
    """
    return _close(participants, of_everybody(size))


def of_everybody(size: int) -> list[float]:
    """The sum of the tokens of all ``size`` ranks."""
    return [size, size * (size + 1) / 2, size * (size + 1) * (2 * size + 1) / 6]


def reduced_for_everybody(reduced: Sequence[float], size: int) -> bool:
    """Whether a reduced token may be the sum of all ``size`` ranks' tokens, scaled in any way.

    No proper subset of at most six ranks has such a sum, and few larger ones do.
    """
    scale = reduced[0] / size
    return _close(reduced, [scale * value for value in of_everybody(size)])


def reduction_scale(
    reduced: Sequence[float], participants: Sequence[float], size: int, name: str
) -> float:
    """The factor on the sum of the ranks' gradients that Horovod's operation implies.

    It is ``1 / size`` for Average, with or without predivide factors, and ``1`` for Sum. ``reduced`` is the
    token after Horovod's allreduce, including its scaling; ``participants`` is the sum of the tokens of
    the ranks that take part, out of ``size``.

    Raises:
        ExchangeError: the operation is Min, Max, Product or Adasum, or is in another process set.
    """
    if _close(reduced, [value / size for value in participants]):
        return 1.0 / size
    if _close(reduced, participants):
        return 1.0
    raise ExchangeError(
        f"{name}: expected op=Average or op=Sum over the compressor's process set of {size} ranks, whose "
        f"tokens add up to {_show(participants)}; Horovod's reduction gave {_show(reduced)}. Compressed "
        f"gradients cannot be reduced with Min, Max, Product or Adasum, and the compressor's process_set "
        f"must be the optimizer's."
    )


def _close(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(v - e) <= TOLERANCE * abs(e) for v, e in zip(values, expected, strict=True))


def _show(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"
