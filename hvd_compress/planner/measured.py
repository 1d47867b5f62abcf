"""What the ranks have measured: links and codecs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.routing import Route
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed, Link

Coding = tuple[Codec, ErrorFeedback]
"""What has a speed: a codec, with or without a residual to read and write."""

HALF = "all_reduce float16"
"""Measured apart: on processors, adding halves may take longer than sending them."""

KINDS = ("all_reduce", HALF, "all_gather", "all_to_all")
"""The collectives that are measured."""


@dataclass(frozen=True)
class Measured:
    """Everything that predictions are made from, each part as slow as on the slowest rank.

    Attributes:
        hosts, local: how many hosts there are, and ranks on each.
        sent: bytes that each rank sends in a large collective.
        small: seconds of an all_reduce of a few bytes.
        large: seconds of a large collective of each of :data:`KINDS`.
        speeds: of the codecs; a codec that is not in it takes no time.
        bits: of an element's code, of the codecs whose payloads vary in length; see
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
        """Bytes that a rank sends in a second, not counting the start of a collective.

        A difference of close times is uncertain: the start counts for nine tenths at most.
        """
        return self.sent / max(self.large[kind] - self.small, 0.1 * self.large[kind])

    def with_links(self, times: float) -> Measured:
        """The same with all links so many times as fast."""
        large = {k: self.small + self.sent / (times * self.bandwidth(k)) for k in self.large}
        return dataclasses.replace(self, large=large)

    def cluster(self, kind: str) -> Cluster:
        """The ranks as collectives of one of :data:`KINDS` find them."""
        # A ring over several hosts is as fast as the links between them; those within are not known.
        link, unknown = Link(self.bandwidth(kind)), Link(math.inf)
        between, within = (link, unknown) if self.hosts > 1 else (unknown, link)
        return Cluster(self.hosts, self.local, between, within, start=self.small)

    def speed(self, route: Route) -> CodecSpeed:
        """How fast that route's codec is."""
        return self.speeds.get((route.codec, route.feedback), CodecSpeed())
