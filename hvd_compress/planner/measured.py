"""What the planner knows of a job: links, codecs, and how much of an exchange is hidden."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchange.routing import Route
from hvd_compress.perfmodel.exchanges import Collective
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed, Link

Coding = tuple[Codec, ErrorFeedback]
"""What has a speed: a codec, with or without a residual to read and write."""


HALF = "allreduce float16"
"""Has a speed of its own: on processors, adding halves may take longer than sending them."""

KINDS = ("allreduce", HALF, "allgather", "alltoall")
"""The collectives that are measured."""


def kind(collective: Collective, route: Route) -> str:
    """Which of :data:`KINDS` a collective of a route is."""
    halves = route.dense and route.dense_dtype == "float16"
    return HALF if halves else collective.kind


@dataclass(frozen=True)
class Probe:
    """One burst of measurements, each as slow as on the slowest rank.

    Attributes:
        sent: bytes that each rank sends in a large collective.
        small: seconds of an allreduce of a few bytes.
        seconds: of a large collective of each of :data:`KINDS`.
    """

    sent: float
    small: float
    seconds: Mapping[str, float]

    def bandwidth(self, kind: str) -> float:
        """Bytes that a rank sends in a second, the start of a collective taken out.

        A difference of two times is uncertain where they are close: at most nine tenths are taken out.
        """
        seconds = self.seconds[kind]
        return self.sent / max(seconds - self.small, 0.1 * seconds)


def best(probes: Sequence[Probe]) -> Probe:
    """Each part at its fastest: whatever disturbs a measurement makes it longer."""
    return Probe(
        sent=probes[0].sent,
        small=min(probe.small for probe in probes),
        seconds={kind: min(probe.seconds[kind] for probe in probes) for kind in KINDS},
    )


@dataclass(frozen=True)
class Measured:
    """Everything that predictions are made from.

    Attributes:
        hosts: how many there are.
        local: ranks on each.
        probe: of the links.
        speeds: of every codec that is allowed, seconds an element; what is not in it takes no time.
        window: seconds of the backward pass from the first gradient to the last, in which messages travel
            while the ranks compute.
    """

    hosts: int
    local: int
    probe: Probe
    speeds: Mapping[Coding, CodecSpeed]
    window: float = 0.0

    def with_links(self, times: float) -> Measured:
        """The same with all links so many times as fast."""
        probe = self.probe
        seconds = {k: probe.small + probe.sent / (times * probe.bandwidth(k)) for k in KINDS}
        return dataclasses.replace(self, probe=dataclasses.replace(probe, seconds=seconds))

    def cluster(self, kind: str) -> Cluster:
        """The ranks as collectives of one of :data:`KINDS` find them."""
        # A ring among several hosts is as fast as what is between them; what is within is not known.
        link, unknown = Link(self.probe.bandwidth(kind)), Link(math.inf)
        between, within = (link, unknown) if self.hosts > 1 else (unknown, link)
        return Cluster(self.hosts, self.local, between, within, start=self.probe.small)

    def speed(self, route: Route) -> CodecSpeed:
        """That route's codec."""
        return self.speeds.get((route.codec, route.feedback), CodecSpeed())
