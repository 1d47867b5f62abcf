"""The two-shot exchange: each rank averages a part of the tensor, and sends the average to all ranks.

The bytes that a rank sends do not grow with the number of ranks (1-bit SGD, section 3.1). Every rank
encodes each owner's shard as a separate tensor, and sends the payload to the owner (first shot). The owner
decodes and averages the payloads, encodes the average again, and sends it to all ranks (second shot).

Owners average rather than add, because codecs with a fixed range would clip a sum; the factor that turns
the average into a sum is applied at the end.
"""

from __future__ import annotations

from hvd_compress.codecs import Codec
from hvd_compress.exchanges.limits import MAX_GATHERED_BYTES
from hvd_compress.exchanges.shards import Shards

MAX_RANKS = 65535
"""The largest number of ranks for which the noise has enough streams: see :func:`first_stream`."""


def first_stream(rank: int, owner: int, size: int) -> int:
    """The rank in the noise key of the payload from ``rank`` to ``owner``: ``rank * size + owner``.

    The elements of every shard are numbered from 0, so that each shard needs separate noise; the key's
    tensor and step are the same for all shards.
    """
    return rank * size + owner


def second_stream(owner: int, size: int) -> int:
    """The rank in the noise key of the payload from ``owner`` to all: ``size * size + owner``."""
    return size * size + owner


def check(name: str, codec: Codec, shards: Shards) -> None:
    """Raises ``ValueError`` if this exchange cannot carry a tensor.

    Args:
        name: the tensor's name.
        codec: the codec that encodes the tensor's parts.
        shards: the tensor's parts.
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
