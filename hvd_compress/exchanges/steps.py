"""What each exchange does with one gradient: what a rank computes, and what it sends.

There is one function for each exchange. The performance model, the planner and the benchmarks take bytes
and computation from here. The gradients of a bucket do each step together. What a bucket adds to its
messages is left out: flags, the zeros behind an owner's message that is shorter than the longest, and the
words behind an integer sum's levels. Payloads of varying length count with the bytes that are
expected (:mod:`hvd_compress.codecs.lengths`), in messages of the length that ranks agree on for them
(:mod:`hvd_compress.exchanges.packing`) after the first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.lengths import expected_bytes
from hvd_compress.codecs.packing import WORD_BITS
from hvd_compress.exchanges import integer_sum as sums
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.packing import agreed
from hvd_compress.exchanges.shards import Shared, shared
from hvd_compress.ranks.counters import Kind, sent_bytes

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Gradient:
    """One gradient to exchange.

    Attributes:
        shape: its shape.
        codec: what it is encoded with.
        element_bytes: of an element in the gradient's own dtype.
        hosts: the ranks.
        cast_bytes: of an element after the cast, where it is cast and not encoded; else None.
        bits: of an element's code, where payloads vary in length; None is what normally distributed
            gradients take.
    """

    shape: Shape
    codec: Codec
    element_bytes: int
    hosts: Hosts
    cast_bytes: int | None = None
    bits: float | None = None

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Computation:
    """What a rank computes before, between or after its collectives, in elements.

    Attributes:
        encoded: elements that it encodes, or casts before an ``all_reduce``.
        decoded: elements of payloads that it decodes and adds up, or casts back.
        added: uncompressed elements that it adds up.
    """

    encoded: float = 0.0
    decoded: float = 0.0
    added: float = 0.0


@dataclass(frozen=True)
class Message:
    """What a rank gives to one collective; in an ``all_to_all``, what it gives to each rank.

    Attributes:
        kind: the collective.
        mean: bytes, on average over the ranks.
        largest: bytes of the rank with the most.
        added: numbers that an ``all_reduce`` adds up.
    """

    kind: Kind
    mean: float
    largest: float
    added: int = 0

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends among so many, on average over them."""
        return sent_bytes(self.kind, ranks, self.mean)


Steps = Sequence[Computation | Message]
"""In their order, for more than one rank; one message for each stage of the exchange."""


def all_reduce(numbers: int, number_bytes: int = FLOAT_BYTES) -> Message:
    """The sum, or the maximum, of so many numbers."""
    return Message("all_reduce", numbers * number_bytes, numbers * number_bytes, numbers)


def uncompressed(gradient: Gradient) -> Steps:
    """An ``all_reduce`` of the gradient itself, after a cast where there is one."""
    width = gradient.cast_bytes or gradient.element_bytes
    cast = gradient.count if width != gradient.element_bytes else 0
    return Computation(encoded=cast), all_reduce(gradient.count, width), Computation(decoded=cast)


def allgather(gradient: Gradient) -> Steps:
    """Every rank sends its payload to all others."""
    payload = _payload(gradient.codec, gradient.shape, gradient.bits)
    return (
        Computation(encoded=gradient.count),
        Message("all_gather", payload, payload),
        Computation(decoded=gradient.hosts.size * gradient.count),
    )


def two_shot(gradient: Gradient) -> Steps:
    """Ranks send each part to its owner, who averages the payloads of all ranks and sends the average."""
    part = _parts(shared(gradient.codec, gradient.shape), gradient.hosts.size, gradient.bits)
    return (
        Computation(encoded=gradient.count),
        Message("all_to_all", *part),
        Computation(decoded=gradient.count, encoded=gradient.count / gradient.hosts.size),
        Message("all_gather", *part),
        Computation(decoded=gradient.count),
    )


def hierarchical(gradient: Gradient) -> Steps:
    """Uncompressed parts within a host, payloads of its averages between hosts and within it."""
    hosts, local = gradient.hosts, gradient.hosts.local
    cut = shared(gradient.codec, gradient.shape)
    longest = max(cut.shards(local).lengths())
    mean, largest = _parts(cut, local, gradient.bits)
    return (
        Message(
            "all_to_all",
            gradient.element_bytes * gradient.count / local,
            gradient.element_bytes * longest,
        ),
        Computation(added=gradient.count, encoded=gradient.count / local),
        Message("all_gather", mean, largest),
        Message("all_gather", hosts.count * mean, hosts.count * largest),
        Computation(decoded=hosts.count * gradient.count),
    )


def integer_sum(gradient: Gradient) -> Steps:
    """A pass for the norms, their maximum, levels made with it, and the levels' sum."""
    codec, shape = gradient.codec, gradient.shape
    assert isinstance(codec, LevelCodec)
    words = codec.level_words(shape, sums.bits_of(codec, gradient.hosts.size))
    return (
        Computation(added=gradient.count),
        all_reduce(codec.layout(shape).scales),
        Computation(encoded=gradient.count),
        all_reduce(words, WORD_BITS // 8),
        Computation(decoded=gradient.count),
    )


def _payload(codec: Codec, shape: Shape, bits: float | None) -> int:
    """A payload's part of a message, in bytes."""
    capacity = codec.payload_bytes(shape)
    if not codec.varies:
        return capacity
    return agreed(math.ceil(expected_bytes(codec, shape, bits)), capacity)


@lru_cache(maxsize=4096)
def _parts(cut: Shared, owners: int, bits: float | None) -> tuple[float, int]:
    """Bytes of the owners' payloads: their mean, and the largest."""
    shards, codec = cut.shards(owners), cut.codec
    lengths = shards.lengths()
    sizes = {n: _payload(codec, shards.shape(n), bits) if n else 0 for n in lengths}
    total = sum(ranks * sizes[length] for length, ranks in lengths.items())
    return total / owners, max(sizes.values())
