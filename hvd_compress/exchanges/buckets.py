"""Buckets of gradients that are sent together, in few messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 2**20
"""The largest number of elements in a bucket. A larger bucket would delay its first gradients for longer
and gain nothing: even at one bit per element, its bytes take longer than a message's latency."""


def compose(tensors: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Composes buckets, which are the same wherever the tensors are the same.

    The tensors with the highest numbers are first, as their gradients are ready first. A tensor joins the
    latest bucket unless that would exceed :data:`LIMIT`, so that large tensors are sent alone.

    Args:
        tensors: the number and the element count of each tensor.

    Returns:
        The numbers of the tensors in each bucket.
    """
    made: list[list[int]] = []
    left = -1
    for number, count in sorted(tensors, reverse=True):
        if count > left:
            made.append([])
            left = LIMIT
        made[-1].append(number)
        left -= count
    return made
