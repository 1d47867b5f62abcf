"""What a prediction is about: links, how fast ranks compute, and how ranks stand on hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass


def _check_seconds(owner: str, field: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{owner}.{field}: expected a number of seconds, got {value}")


@dataclass(frozen=True)
class Link:
    """A connection that sends and receives at the same time.

    Attributes:
        bandwidth: bytes a second in each direction; may be infinite.
        latency: seconds that a message takes beside its bytes.

    Raises:
        ValueError: a bandwidth that is not positive, or a latency that is negative or not finite.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(
                f"Link.bandwidth: expected more than 0 bytes a second, got {self.bandwidth}"
            )
        _check_seconds("Link", "latency", self.latency)


@dataclass(frozen=True)
class CodecSpeed:
    """How fast one rank computes, in seconds an element.

    Attributes:
        encode: to encode an element, its residual included where there is feedback.
        decode: to decode one payload's element and add it to the sum.
        add: to add uncompressed elements, in a ring or in an owner's hands.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    encode: float = 0.0
    decode: float = 0.0
    add: float = 0.0

    def __post_init__(self) -> None:
        for field in ("encode", "decode", "add"):
            _check_seconds("CodecSpeed", field, getattr(self, field))


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equally many ranks, numbered host by host.

    Attributes:
        hosts: how many there are.
        local: ranks on each.
        between: a host's connection to the others, which its ranks share.
        within: what each rank has to the other ranks of its host.
        start: seconds from the call of a collective to its first message: negotiation, a waiting cycle.

    Raises:
        ValueError: no host, no rank, or a start that is negative or not finite.
    """

    hosts: int
    local: int
    between: Link
    within: Link = Link(math.inf)
    start: float = 0.0

    def __post_init__(self) -> None:
        for field in ("hosts", "local"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"Cluster.{field}: expected at least 1, got {getattr(self, field)}"
                )
        _check_seconds("Cluster", "start", self.start)

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.hosts * self.local
