"""The ranks' measurements of links and codecs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.routing import Route
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link

Coding = tuple[Codec, ErrorFeedback]
"""A codec and its error feedback, which together have a speed: a residual is read and written, too."""

HALF = "all_reduce float16"
"""The name of an all_reduce of halves, measured separately: on CPUs, adding halves may take longer than
sending them."""

KINDS = ("all_reduce", HALF, "all_gather", "all_to_all")
"""The collectives that are measured."""


@dataclass(frozen=True)
class Measured:
    """The measurements for predictions, each with the time of the slowest rank.

    Attributes:
        hosts, local: the number of hosts, and the number of ranks on each.
        sent: the bytes that each rank sends in a large collective.
        small: the seconds that an all_reduce of a few bytes takes.
        large: the seconds that a large collective of each of :data:`KINDS` takes.
        speeds: the speeds of the codecs; a codec without a speed takes no time.
        bits: the average bits in an element's code for each codec with payloads that vary in length; see
            :mod:`hvd_compress.codecs.lengths`.
    """

    hosts: int
    local: int
    sent: float
    small: float
    large: Mapping[str, float]
    speeds: Mapping[Coding, CodecSpeed] = dataclasses.field(default_factory=dict)
    bits: Mapping[Coding, float] = dataclasses.field(default_factory=dict)

    def bandwidth(self, kind: str = KINDS[0]) -> float:
        """The bytes that a rank sends per second, excluding the start of a collective.

        As the difference of close times is uncertain, the start counts for nine tenths of the time at
        most.
        """
        return self.sent / max(self.large[kind] - self.small, 0.1 * self.large[kind])

    def with_links(self, times: float) -> Measured:
        """The same measurements with all links ``times`` times as fast."""
        large = {k: self.small + self.sent / (times * self.bandwidth(k)) for k in self.large}
        return dataclasses.replace(self, large=large)

    def over_links(self, bandwidth: float) -> Measured:
        """The same measurements where ranks send so many bytes per second, whatever the collective."""
        seconds = self.small + self.sent / bandwidth
        return dataclasses.replace(self, large=dict.fromkeys(self.large, seconds))

    def cluster(self, kind: str) -> Cluster:
        """The ranks and links as measured with collectives of one of :data:`KINDS`."""
        # A ring over several hosts is as fast as the links between them; those within are not known.
        link, unknown = Link(self.bandwidth(kind)), Link(math.inf)
        between, within = (link, unknown) if self.hosts > 1 else (unknown, link)
        return Cluster(self.hosts, self.local, between, within, start=self.small)

    def speed(self, route: Route) -> CodecSpeed:
        """The speed of a route's codec."""
        return self.speeds.get((route.codec, route.feedback), CodecSpeed())
