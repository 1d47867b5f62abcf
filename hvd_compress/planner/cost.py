"""The cost of one tensor's exchange: bytes counted as the exchanges count them, seconds by a linear model.

A collective takes ``start + latencies * latency + bytes / bandwidth`` (Hockney's model), a codec a fixed
time per element. Allreduce and allgather are rings, as in Gloo and in
:class:`~hvd_compress.ranks.counters.Counters`; an alltoall sends to all other ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.codecs.base import Shape
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import EXCHANGES, UNCOMPRESSED
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.steps import FLOAT_BYTES, Computation, Gradient
from hvd_compress.planner.collectives import Collective, Stage, collective
from hvd_compress.planner.machines import Cluster, CodecSpeed
from hvd_compress.ranks.counters import Kind


class Cost(NamedTuple):
    """The seconds and bytes of exchanges, or of a part of one, without any overlap.

    Attributes:
        encode: the seconds in encoders.
        wire: the seconds in collectives, including latencies.
        decode: the seconds in decoders, and in adding up.
        sent: the bytes that a rank sends, averaged over the ranks.
    """

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    sent: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all seconds."""
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
        shape: the tensor's shape.
        route: the codec, the feedback and the exchange; an uncompressed tensor always takes an allreduce.
        speed: the codec's speed, with feedback if the route has feedback.
        cluster: the ranks and links.
        element_bytes: the bytes of an element in the gradient's dtype.
        links: a function that returns the cluster as measured with a kind of collective; None means
            ``cluster`` for all kinds.
        started: the fraction of a message's start that counts for the tensor; the rest is for other tensors
            in its bucket.
        bits: the bits in an element's code, as in :class:`~hvd_compress.exchanges.steps.Gradient`.
    """
    costs = []
    for stage in stages_of(shape, route, cluster, element_bytes=element_bytes, bits=bits):
        if isinstance(stage, Computation):
            costs.append(computation_cost(stage, speed))
        elif stage.latencies:
            found = cluster if links is None else links(stage.kind)
            wire = collective_seconds([(stage, speed)], found) - (1 - started) * found.start
            costs.append(Cost(wire=wire, sent=stage.sent))
    return sum_of(costs)


def computation_cost(stage: Computation, speed: CodecSpeed) -> Cost:
    """The cost of a computation."""
    decode = stage.decoded * speed.decode + stage.added * speed.add
    return Cost(encode=stage.encoded * speed.encode, decode=decode)


def sum_of(costs: Iterable[Cost]) -> Cost:
    """The sum of costs, each part by itself."""
    return Cost(*map(sum, zip(*costs, strict=True)))


def wire_bytes(shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4) -> float:
    """The bytes that a rank sends, averaged over the ranks, as in ``Counters.wire_bytes``.

    They include neither the token of 12 bytes for each encoded tensor nor the bytes that a bucket adds
    (:mod:`hvd_compress.exchanges.steps`).
    """
    return seconds(shape, route, CodecSpeed(), cluster, element_bytes=element_bytes).sent


def stages_of(
    shape: Shape,
    route: Route,
    cluster: Cluster,
    *,
    element_bytes: int = 4,
    bits: float | None = None,
) -> Sequence[Stage]:
    """The stages of one tensor's exchange; none if there is only one rank.

    See :func:`seconds` for the arguments.
    """
    if cluster.ranks == 1:
        return ()
    hosts = Hosts(cluster.ranks, cluster.local)
    cast = np.dtype(route.cast_dtype).itemsize if route.uncompressed and route.cast_dtype else None
    gradient = Gradient(shape, route.codec, element_bytes, hosts, cast, bits, route.inner)
    exchange = UNCOMPRESSED if route.uncompressed else EXCHANGES[route.exchange]
    scopes = iter(exchange.stages)
    return [
        step if isinstance(step, Computation) else collective(step, next(scopes), hosts)
        for step in exchange.steps(gradient)
    ]


def collective_seconds(
    collectives: Sequence[tuple[Collective, CodecSpeed]], cluster: Cluster
) -> float:
    """The seconds of one or several tensors' collectives as one message.

    The latency counts once. Small tensors have different owners, so that several tensors load all
    connections equally, but at least as much as each tensor loads its busiest connection.

    Args:
        collectives: collectives of the same kind, each with a speed for adding up its numbers.
        cluster: the ranks and links.
    """
    head = collectives[0][0]
    if not head.latencies:
        return 0.0
    inside = _loaded([(one.load.inside, one.busiest.inside) for one, _ in collectives])
    leaving = _loaded([(one.load.leaving, one.busiest.leaving) for one, _ in collectives])
    # In a ring, all ranks wait for the slowest message.
    slowest = cluster.between if leaving else cluster.within
    return (
        cluster.start
        + head.latencies * slowest.latency
        + max(inside / cluster.within.bandwidth, leaving / cluster.between.bandwidth)
        + sum(one.added * speed.add for one, speed in collectives)
    )


def refusal(name: str, shape: Shape, route: Route, cluster: Cluster) -> str | None:
    """The message of the error with which an exchange would refuse a tensor; None if it would not.

    The tensor is float32.
    """
    group = Group(0, cluster.ranks, Hosts(cluster.ranks, cluster.local))
    try:
        route.check(name, shape, FLOAT_BYTES, group)
    except ValueError as error:
        return str(error)
    return None


def _loaded(loads: Sequence[tuple[float, float]]) -> float:
    return max(sum(mean for mean, _ in loads), max(busiest for _, busiest in loads))
