"""Gathers between two ranks, as a sum.

What is left of the sum of two messages, as integers modulo 2^32, without one's own is the other's. Gloo
sends as many bytes for a sum of two as for a gather, but in pieces and both ways at once; of a gather of
long messages, one rank often waits until the other's has come whole.
"""

from __future__ import annotations

LONG = 2**19
"""Bytes. A socket's buffers take shorter messages at once, and no rank waits."""


def as_sum(size: int, length: int) -> bool:
    """Whether ranks gather messages as a sum.

    Args:
        size: ranks.
        length: bytes of every rank's message.
    """
    return size == 2 and length >= LONG and length % 4 == 0
