"""Which tensors travel together: few messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 2**20
"""Elements of a bundle. Larger ones would hold their first tensors back for longer, and gain nothing: even
at a bit an element, the bytes of such a bundle take longer than a message's latency."""


def bundles(tensors: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Makes up bundles, the same wherever the tensors are the same.

    The last tensors come first, for so do their gradients. A tensor joins the one before it unless the
    bundle would exceed :data:`LIMIT`, so that large tensors travel alone.

    Args:
        tensors: (number, elements) of each.

    Returns:
        The numbers in each bundle.
    """
    made: list[list[int]] = []
    room = -1
    for number, count in sorted(tensors, reverse=True):
        if count > room:
            made.append([])
            room = LIMIT
        made[-1].append(number)
        room -= count
    return made
