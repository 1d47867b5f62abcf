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


def heirs(old_size: int, new_size: int, rank: int) -> tuple[list[int], float]:
    """The old ranks whose residuals a new rank takes over, and the factor on their sum."""
    return list(range(rank, old_size, new_size)), new_size / old_size
