"""What one tensor's exchange costs: bytes counted as the exchanges count them, seconds by a linear model.

A collective takes ``start + rounds * latency + bytes / bandwidth`` (Hockney's model), a codec a fixed time
an element. Allreduce and allgather are rings, as Gloo's are and as
:class:`~hvd_compress.exchange.counters.Counters` takes them; an alltoall sends to all others at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_compress.codecs.base import Shape
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.perfmodel.exchanges import (
    EXCHANGES,
    Collective,
    Exchange,
    Message,
    Step,
    Work,
    together,
)
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed, Link

__all__ = [
    "Cluster",
    "CodecSpeed",
    "Cost",
    "Link",
    "refusal",
    "seconds",
    "steps_of",
    "wire_bytes",
]


@dataclass(frozen=True)
class Cost:
    """Seconds of one tensor's exchange, nothing overlapping.

    Attributes:
        encode: in encoders.
        wire: in collectives, latencies included.
        decode: in decoders, and in adding up.
    """

    encode: float
    wire: float
    decode: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.encode + self.wire + self.decode


def seconds(
    shape: Shape, route: Route, speed: CodecSpeed, cluster: Cluster, *, element_bytes: int = 4
) -> Cost:
    """The predicted time of one tensor's exchange, from its gradient to the sum on every rank.

    Args:
        shape: the tensor's.
        route: codec, feedback and exchange; a dense one is Horovod's allreduce, whatever its exchange.
        speed: the codec's, with feedback if the route has it.
        cluster: ranks and links.
        element_bytes: of the gradient's type.

    Raises:
        ValueError: no model of that exchange.
    """
    steps = steps_of(shape, route, cluster, element_bytes=element_bytes)
    works = [step for step in steps if isinstance(step, Work)]
    collectives = [step for step in steps if isinstance(step, Collective)]
    return Cost(
        encode=sum(work.encoded for work in works) * speed.encode,
        wire=sum(together([(one, speed)], cluster) for one in collectives),
        decode=sum(work.decoded * speed.decode + work.added * speed.add for work in works),
    )


def wire_bytes(shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4) -> float:
    """Bytes that a rank sends, averaged over the ranks: those that ``Counters.wire_bytes`` counts.

    The token of 12 bytes beside an encoded tensor is not among them.
    """
    steps = steps_of(shape, route, cluster, element_bytes=element_bytes)
    return sum(step.sent for step in steps if isinstance(step, Collective))


def steps_of(
    shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4
) -> Sequence[Step]:
    """What is done for one tensor, step by step; nothing where a rank is alone.

    Args and errors are those of :func:`seconds`.
    """
    exchange, message = _message(shape, route, cluster, element_bytes)
    return exchange.steps(message) if cluster.ranks > 1 else ()


def refusal(
    name: str, shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4
) -> str | None:
    """Why an exchange would refuse a tensor of that name, as the error that it raises says; or None."""
    exchange, message = _message(shape, route, cluster, element_bytes)
    try:
        exchange.check(name, message)
    except ValueError as error:
        return str(error)
    return None


def _message(
    shape: Shape, route: Route, cluster: Cluster, element_bytes: int
) -> tuple[Exchange, Message]:
    name = "allreduce" if route.dense else route.exchange
    if name not in EXCHANGES:
        raise ValueError(f"exchange: expected one of {', '.join(EXCHANGES)}, got {name!r}")
    cast = route.dense_dtype if route.dense else None
    message = Message(
        shape,
        route.codec,
        element_bytes,
        element_bytes if cast is None else np.dtype(cast).itemsize,
        Hosts(cluster.ranks, cluster.local),
    )
    return EXCHANGES[name], message
