"""Hands on residuals when a job continues with another number of ranks.

A residual is gradient that has been computed but not sent. What it would have added to the ranks'
*average* is preserved, to the last element, on whichever rank it is afterwards.

* A rank's own residual: new rank ``r`` of ``K'`` takes the sum of those of the old ranks ``r``, ``r + K'``,
  ``r + 2 K'``, ... of ``K``, times ``K' / K`` (:func:`heirs`). With more ranks than before, some start with
  zeros.
* A rank's part of a tensor that the ranks share (a two-shot exchange's second residuals, an owner step's
  state) is divided again: each element goes to its new owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def heirs(old_size: int, new_size: int, rank: int) -> tuple[list[int], float]:
    """The old ranks whose residuals a new rank takes over, and the factor on their sum."""
    return list(range(rank, old_size, new_size)), new_size / old_size


def hand_on(
    residuals: Sequence[tuple[Any, float] | None],
    parts: Iterable[Any],
    size: int,
    rank: int,
    *,
    divided: bool,
) -> tuple[Any | None, Any | None]:
    """Hands on the residuals of one gradient to a rank of a job of another size.

    Args:
        residuals: each old rank's residual, an array or a tensor, and a factor on it; None without one.
        parts: for each old rank that owned a part of the gradient, what the part's residual adds to the
            ranks' average, in an array of the whole gradient's size.
        size: the new number of ranks.
        rank: the new rank.
        divided: whether the new ranks divide the gradient.

    Returns:
        The rank's residual of the whole gradient, and the sum of the parts. If the new ranks divide the
        gradient, the rank cuts its own part from the sum; otherwise the residual includes the sum, and the
        second value is None. None stands for zeros.
    """
    old, factor = heirs(len(residuals), size, rank)
    taken = (residuals[one] for one in old)
    residual = _sum(one[0] * (factor * one[1]) for one in taken if one is not None)
    total = _sum(parts)
    return (
        (residual, total)
        if divided
        else (_sum(x for x in (residual, total) if x is not None), None)
    )


def _sum(arrays: Iterable[Any]) -> Any | None:
    total = None
    for one in arrays:
        total = one if total is None else total + one
    return total
