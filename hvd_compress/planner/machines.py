"""The machines of a prediction: links, the speeds of codecs, and the ranks on hosts."""

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
        bandwidth: the bytes per second in each direction; may be infinite.
        latency: the seconds that a message takes besides the time for its bytes.

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
    """The speed of one rank's computation, in seconds per element.

    Attributes:
        encode: the seconds to encode an element and, with feedback, to update its residual.
        decode: the seconds to decode an element of one payload and add it to the sum.
        add: the seconds to add an uncompressed element, in a ring or by an owner.

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
    """Equal hosts with the same number of ranks on each, numbered host by host.

    Attributes:
        hosts: the number of hosts.
        local: the number of ranks on each host.
        between: a host's connection to the other hosts, which its ranks share.
        within: a rank's connection to the other ranks on its host.
        start: the seconds from the call of a collective to its first message: negotiation, a waiting cycle.

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
        """The number of ranks in the job."""
        return self.hosts * self.local
