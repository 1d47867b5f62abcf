"""Gathers between two ranks, done as a sum.

The sum of two messages, as integers modulo 2^32, minus a rank's own message is the other rank's. Gloo sends
the same number of bytes for a sum over two ranks as for a gather, but in pieces and in both directions at
once; in a gather of long messages, one rank often waits until it has received the other's whole message.
"""

from __future__ import annotations

LONG = 2**19
"""The bytes of the shortest long message: a socket's buffers hold shorter ones, and no rank waits."""


def as_sum(size: int, length: int) -> bool:
    """Whether ``size`` ranks gather messages, each of ``length`` bytes, as a sum."""
    return size == 2 and length >= LONG and length % 4 == 0
