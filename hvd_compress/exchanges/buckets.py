"""Which gradients travel together: few messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 2**20
"""Elements of a bucket. A larger one would hold its first gradients back for longer, and gain nothing: even
at one bit an element, its bytes take longer than a message's latency."""


def compose(tensors: Iterable[tuple[int, int]], limit: int | None = None) -> list[list[int]]:
    """Composes buckets, the same ones wherever the tensors are the same.

    The tensors with the highest numbers come first, as their gradients do. A tensor joins the bucket before
    it unless that would exceed the limit, so that large tensors travel alone.

    Args:
        tensors: (number, elements) of each.
        limit: elements of a bucket; None is :data:`LIMIT`.

    Returns:
        The numbers in each bucket.
    """
    limit = LIMIT if limit is None else limit
    made: list[list[int]] = []
    left = -1
    for number, count in sorted(tensors, reverse=True):
        if count > left:
            made.append([])
            left = limit
        made[-1].append(number)
        left -= count
    return made
