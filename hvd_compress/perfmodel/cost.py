"""What one tensor's exchange costs: bytes counted as the exchanges count them, seconds by a linear model.

A collective takes ``start + latencies * latency + bytes / bandwidth`` (Hockney's model), a codec a fixed
time an element. Allreduce and allgather are rings, as Gloo's are and as
:class:`~hvd_compress.ranks.counters.Counters` takes them; an alltoall sends to all others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import EXCHANGES, UNCOMPRESSED, Group
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.steps import Computation, Gradient
from hvd_compress.perfmodel.collectives import Collective, Stage, collective
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed, Link
from hvd_compress.ranks.counters import Kind

__all__ = [
    "Cluster",
    "CodecSpeed",
    "Cost",
    "Link",
    "collective_seconds",
    "refusal",
    "seconds",
    "stages_of",
    "wire_bytes",
]


class Cost(NamedTuple):
    """Seconds of one tensor's exchange, nothing overlapping.

    Attributes:
        encode: in encoders.
        wire: in collectives, latencies included.
        decode: in decoders, and in adding up.
        sent: bytes that a rank sends, on average.
    """

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        """All of the seconds."""
        return self.encode + self.wire + self.decode


def seconds(
    shape: Shape,
    route: Route,
    speed: CodecSpeed,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    links: Callable[[Kind], Cluster] | None = None,
    started: float = 1.0,
    bits: float | None = None,
) -> Cost:
    """The predicted time of one tensor's exchange, from its gradient to the sum on every rank.

    Args:
        shape: the tensor's.
        route: codec, feedback and exchange; an uncompressed tensor takes an allreduce, whatever the
            exchange.
        speed: the codec's, with feedback if the route has it.
        cluster: ranks and links.
        element_bytes: of the gradient's type.
        links: the same cluster as each kind of collective finds it, where that is known.
        started: the tensor's part of a message, whose start it pays; the rest is for others in its bucket.
        bits: of an element's code, as for :class:`~hvd_compress.exchanges.steps.Gradient`.
    """
    stages = stages_of(shape, route, cluster, element_bytes=element_bytes, bits=bits)
    encode = wire = decode = sent = 0.0
    for stage in stages:
        if isinstance(stage, Computation):
            encode += stage.encoded * speed.encode
            decode += stage.decoded * speed.decode + stage.added * speed.add
        elif stage.latencies:
            found = cluster if links is None else links(stage.kind)
            wire += collective_seconds([(stage, speed)], found) - (1 - started) * found.start
            sent += stage.sent
    return Cost(encode, wire, decode, sent)


def wire_bytes(
    shape: Shape,
    route: Route,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    bits: float | None = None,
) -> float:
    """Bytes that a rank sends, averaged over the ranks: those that ``Counters.wire_bytes`` counts.

    The token of 12 bytes beside an encoded tensor is not among them, nor is what a bucket adds
    (:mod:`hvd_compress.exchanges.steps`).
    """
    cost = seconds(shape, route, CodecSpeed(), cluster, element_bytes=element_bytes, bits=bits)
    return cost.sent


def stages_of(
    shape: Shape,
    route: Route,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    bits: float | None = None,
) -> Sequence[Stage]:
    """The stages of one tensor's exchange; none where a rank is alone.

    The arguments are those of :func:`seconds`.
    """
    if cluster.ranks == 1:
        return ()
    hosts = Hosts(cluster.ranks, cluster.local)
    cast = np.dtype(route.cast_dtype).itemsize if route.uncompressed and route.cast_dtype else None
    gradient = Gradient(shape, route.codec, element_bytes, hosts, cast, bits)
    exchange = UNCOMPRESSED if route.uncompressed else EXCHANGES[route.exchange]
    scopes = iter(exchange.stages)
    return [
        step if isinstance(step, Computation) else collective(step, next(scopes), hosts)
        for step in exchange.steps(gradient)
    ]


def collective_seconds(
    collectives: Sequence[tuple[Collective, CodecSpeed]], cluster: Cluster
) -> float:
    """Seconds of one or several tensors' collectives as one message.

    Latency is paid once. Small tensors have different owners, so that several tensors load all connections
    alike, but not less than each of them loads its busiest.

    Args:
        collectives: alike, each with the speed at which its codec's numbers are added.
        cluster: ranks and links.
    """
    head = collectives[0][0]
    if not head.latencies:
        return 0.0
    inside = _loaded([(one.load.inside, one.busiest.inside) for one, _ in collectives])
    leaving = _loaded([(one.load.leaving, one.busiest.leaving) for one, _ in collectives])
    # In a ring, all wait for the slowest message.
    slowest = cluster.between if leaving else cluster.within
    return (
        cluster.start
        + head.latencies * slowest.latency
        + max(inside / cluster.within.bandwidth, leaving / cluster.between.bandwidth)
        + sum(one.added * speed.add for one, speed in collectives)
    )


def refusal(
    name: str, shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4
) -> str | None:
    """Why an exchange would refuse a tensor of that name, as the error that it raises says; or None."""
    exchange = UNCOMPRESSED if route.uncompressed else EXCHANGES[route.exchange]
    group = Group(0, cluster.ranks, Hosts(cluster.ranks, cluster.local))
    try:
        exchange.check(name, shape, route.codec, element_bytes, group)
    except ValueError as error:
        return str(error)
    return None


def _loaded(loads: Sequence[tuple[float, float]]) -> float:
    return max(sum(mean for mean, _ in loads), max(busiest for _, busiest in loads))
