"""The steps of an exchange for one gradient: a rank's computation and messages.

Each module of an exchange has a function ``steps``, from which the performance model, the planner and the
benchmarks get bytes and computation. The gradients of a bucket do each step together. The steps omit the
bytes that a bucket adds to its messages: flags, the zeros behind an owner's message that is shorter than
the longest one, and the words after an integer sum's levels. Payloads of varying length count with their
expected bytes (:mod:`hvd_compress.codecs.lengths`), in messages of the length that ranks agree on after
the first step (:mod:`hvd_compress.exchanges.packing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.lengths import expected_bytes
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.packing import agreed
from hvd_compress.exchanges.shards import Shared
from hvd_compress.ranks.counters import Kind, sent_bytes

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Gradient:
    """One gradient to exchange.

    Attributes:
        shape: the gradient's shape.
        codec: the codec that encodes the gradient.
        element_bytes: the bytes of an element in the gradient's own dtype.
        hosts: the ranks on their hosts.
        cast_bytes: the bytes of an element after the cast, if the gradient is cast and not encoded;
            otherwise None.
        bits: the average number of bits in an element's code, if payloads vary in length; None means that
            of normally distributed gradients.
        inner: the codec within a host, in a hierarchical exchange; None without one.
    """

    shape: Shape
    codec: Codec
    element_bytes: int
    hosts: Hosts
    cast_bytes: int | None = None
    bits: float | None = None
    inner: Codec | None = None

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Computation:
    """The computation of a rank before, between or after its collectives, in elements.

    Attributes:
        encoded: the number of elements that the rank encodes, or casts before an ``all_reduce``.
        decoded: the number of payloads' elements that the rank decodes and adds up, or casts back.
        added: the number of uncompressed elements that the rank adds up.
    """

    encoded: float = 0.0
    decoded: float = 0.0
    added: float = 0.0


@dataclass(frozen=True)
class Message:
    """The input of a rank to one collective; in an ``all_to_all``, the input for each rank.

    Attributes:
        kind: the kind of the collective.
        mean: the bytes, averaged over the ranks.
        largest: the bytes of the rank with the most bytes.
        added: the number of numbers that an ``all_reduce`` adds up.
    """

    kind: Kind
    mean: float
    largest: float
    added: int = 0

    def sent(self, ranks: int) -> float:
        """The bytes that a rank sends in a collective of ``ranks`` ranks, averaged over the ranks."""
        return sent_bytes(self.kind, ranks, self.mean)


Steps = Sequence[Computation | Message]
"""The steps in order, for more than one rank, with one message for each stage of the exchange."""


def all_reduce(numbers: int, number_bytes: int = FLOAT_BYTES) -> Message:
    """The message for the sum, or the maximum, of ``numbers`` numbers over the ranks."""
    return Message("all_reduce", numbers * number_bytes, numbers * number_bytes, numbers)


def payload_bytes(codec: Codec, shape: Shape, bits: float | None) -> int:
    """The bytes of a message that a payload takes."""
    capacity = codec.payload_bytes(shape)
    if not codec.varies:
        return capacity
    return agreed(math.ceil(expected_bytes(codec, shape, bits)), capacity)


@lru_cache(maxsize=4096)
def part_bytes(cut: Shared, owners: int, bits: float | None) -> tuple[float, int]:
    """The mean and the maximum of the bytes of the owners' payloads."""
    shards, codec = cut.shards(owners), cut.codec
    lengths = shards.lengths()
    sizes = {n: payload_bytes(codec, shards.shape(n), bits) if n else 0 for n in lengths}
    total = sum(ranks * sizes[length] for length, ranks in lengths.items())
    return total / owners, max(sizes.values())
