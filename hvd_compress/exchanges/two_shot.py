"""The two-shot exchange: each rank adds up a part of the tensor, and sends the sum to all.

1-bit SGD, section 3.1: what a rank sends does not grow with the number of ranks. Every rank encodes each
owner's shard as a tensor of its own. The payloads go to their owners (first shot),
who decode and average them, encode the average again, and send it to all (second shot).

Owners average and do not add, because codecs with a fixed range would cut a sum off; the factor that makes
a sum of it is applied at the end.
"""

from __future__ import annotations

from hvd_compress.codecs import Codec
from hvd_compress.exchanges.limits import MAX_GATHERED_BYTES
from hvd_compress.exchanges.shards import Shards

MAX_RANKS = 65535
"""Above that, the noise would run out of streams: see :func:`first_stream`."""


def first_stream(rank: int, owner: int, size: int) -> int:
    """The rank in the noise key of what ``rank`` sends to ``owner``: ``rank * size + owner``.

    A shard's elements are numbered from 0, so that each shard needs noise of its own; the tensor's number
    and step in the key stay as they are.
    """
    return rank * size + owner


def second_stream(owner: int, size: int) -> int:
    """The rank in the noise key of what ``owner`` sends to all: ``size * size + owner``."""
    return size * size + owner


def check(name: str, codec: Codec, shards: Shards) -> None:
    """Raises ``ValueError`` where a tensor cannot take this exchange.

    Args:
        name: the tensor's.
        codec: what its parts are encoded with.
        shards: its parts.
    """
    if shards.size > MAX_RANKS:
        raise ValueError(
            f"{name}: expected at most {MAX_RANKS} ranks for exchange='two_shot', got {shards.size}"
        )
    sizes = shards.payload_bytes(codec)
    largest = max(sum(sizes), shards.size * max(sizes))
    if largest > MAX_GATHERED_BYTES:
        raise ValueError(
            f"{name}: expected at most {MAX_GATHERED_BYTES} bytes in one message, got {largest}; use a "
            f"codec with fewer bits or exclude the tensor"
        )
