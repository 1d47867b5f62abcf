"""What one tensor's exchange costs: bytes counted as the exchanges count them, seconds by a linear model.

A collective takes ``start + rounds * latency + bytes / bandwidth`` (Hockney's model, one message at a
time), a codec a fixed time an element. Collectives are rings, as Gloo's are and as
:class:`~hvd_compress.exchange.counters.Counters` takes them; an alltoall is a message to each other rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from hvd_compress.codecs import Codec
from hvd_compress.exchange import token
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.hosts import check as check_hierarchical
from hvd_compress.exchange.routing import Route, check_gather
from hvd_compress.exchange.shards import Shards
from hvd_compress.exchange.two_shot import check as check_two_shot

Shape = tuple[int, ...]


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


@dataclass(frozen=True)
class Work:
    """What a rank computes before, between and after its collectives, in elements."""

    encoded: float = 0.0
    decoded: float = 0.0
    added: float = 0.0


@dataclass(frozen=True)
class Collective:
    """One collective of an exchange.

    Attributes:
        kind: Horovod's operation.
        sent: bytes a rank sends, on average over the ranks: those of ``Counters.wire_bytes``.
        inside: bytes through the busiest rank's connection within its host.
        leaving: bytes through the busiest host's connection to the others.
        rounds: messages that wait for each other.
        added: elements that a rank adds on the way.
    """

    kind: Literal["allreduce", "allgather", "alltoall"]
    sent: float
    inside: float
    leaving: float
    rounds: int
    added: float = 0.0

    def seconds(self, cluster: Cluster, speed: CodecSpeed) -> float:
        """How long it takes by itself; 0 where there is nobody to talk to."""
        if not self.rounds:
            return 0.0
        bandwidths = cluster.within.bandwidth, cluster.between.bandwidth
        transfer = max(self.inside / bandwidths[0], self.leaving / bandwidths[1])
        return self.fixed_seconds(cluster) + transfer + self.added * speed.add

    def fixed_seconds(self, cluster: Cluster) -> float:
        """What of it does not depend on the bytes: tensors that travel together pay it once."""
        if not self.rounds:
            return 0.0
        return cluster.start + self.rounds * self._latency(cluster)

    def _latency(self, cluster: Cluster) -> float:
        # A ring's round is over when its slowest message is there.
        return (cluster.between if self.leaving else cluster.within).latency


Step = Work | Collective
"""Of an exchange, in the order in which they are done."""


@dataclass(frozen=True)
class Message:
    """One tensor that is to be exchanged.

    Attributes:
        count: its elements.
        payload_bytes: of the whole tensor as one payload.
        codec: what it is encoded with.
        element_bytes: of the gradient's own type.
        dense_bytes: of an element where Horovod reduces it itself.
        hosts: the ranks.
    """

    count: int
    payload_bytes: int
    codec: Codec
    element_bytes: int
    dense_bytes: int
    hosts: Hosts


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
        wire=sum(collective.seconds(cluster, speed) for collective in collectives),
        decode=sum(work.decoded * speed.decode + work.added * speed.add for work in works),
    )


def wire_bytes(shape: Shape, route: Route, cluster: Cluster, *, element_bytes: int = 4) -> float:
    """Bytes that a rank sends, averaged over the ranks: those that ``Counters.wire_bytes`` counts."""
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


def tokens(count: int, cluster: Cluster) -> Sequence[Step]:
    """The sum of ``count`` tokens, which Horovod gets in the place of so many encoded gradients."""
    if cluster.ranks == 1:
        return ()
    numbers = count * len(token.make(0))
    return (_ring_sum(Hosts(cluster.ranks, cluster.local), 4 * numbers, numbers),)


def allreduce(message: Message) -> Sequence[Step]:
    """Horovod's ring, after a cast where there is one."""
    ring = _ring_sum(message.hosts, message.dense_bytes * message.count, message.count)
    cast = message.count if message.dense_bytes != message.element_bytes else 0
    return Work(encoded=cast), ring, Work(decoded=cast)


def allgather(message: Message) -> Sequence[Step]:
    """Every payload goes round to all."""
    size, sent = message.hosts.size, _gathered(message.hosts.size, message.payload_bytes)
    ring = Collective("allgather", sent, *_in_a_ring(message.hosts, sent), rounds=size - 1)
    return Work(encoded=message.count), ring, Work(decoded=size * message.count)


def two_shot(message: Message) -> Sequence[Step]:
    """Parts to their owners, who decode a payload of each rank, and averages back."""
    hosts, size = message.hosts, message.hosts.size
    mean, largest = _parts(message.codec, message.count, size)
    # A rank sends all parts but its own, and the owner of the largest receives it from all others.
    sent, busiest = (size - 1) * mean, (size - 1) * largest
    abroad = (size - hosts.local) / (size - 1)
    first = Collective(
        "alltoall",
        sent,
        inside=busiest if hosts.local > 1 else 0,
        leaving=abroad * max(busiest, hosts.local * sent),
        # Ranks tell each other first how much will come.
        rounds=2 * (size - 1),
    )
    second = Collective(
        "allgather",
        _gathered(size, mean),
        *_in_a_ring(hosts, _gathered(size, largest)),
        rounds=size - 1,
    )
    share = message.count / size
    return (
        Work(encoded=message.count),
        first,
        Work(decoded=size * share, encoded=share),
        second,
        Work(decoded=message.count),
    )


def hierarchical(message: Message) -> Sequence[Step]:
    """Dense parts within a host, payloads of the host's averages between hosts, all of them within it."""
    hosts, local = message.hosts, message.hosts.local
    mean, largest = _parts(message.codec, message.count, local)
    dense = message.element_bytes * message.count
    counters = Counters()
    counters.add_alltoall(dense, 0)
    parts = counters.wire_bytes * (local - 1) / local
    within = Collective("alltoall", parts, inside=parts, leaving=0, rounds=2 * (local - 1))
    sent = _gathered(hosts.count, mean)
    between = Collective("allgather", sent, inside=0, leaving=local * sent, rounds=hosts.count - 1)
    back = Collective(
        "allgather",
        _gathered(local, hosts.count * mean),
        inside=_gathered(local, hosts.count * largest),
        leaving=0,
        rounds=local - 1,
    )
    share = message.count / local
    return (
        within,
        Work(added=local * share, encoded=share),
        between,
        back,
        Work(decoded=hosts.count * message.count),
    )


def _check_allgather(name: str, message: Message) -> None:
    check_gather(name, message.payload_bytes, message.hosts.size)


def _check_two_shot(name: str, message: Message) -> None:
    check_two_shot(name, message.codec, Shards(message.count, message.hosts.size))


def _check_hierarchical(name: str, message: Message) -> None:
    shards = Shards(message.count, message.hosts.local)
    check_hierarchical(name, message.codec, shards, message.hosts, message.element_bytes)


class Exchange(NamedTuple):
    """What the model has to know of an exchange.

    Attributes:
        steps: those of one tensor, for more than one rank.
        check: raises ``ValueError`` where the exchange refuses a tensor, of which it is told the name.
    """

    steps: Callable[[Message], Sequence[Step]]
    check: Callable[[str, Message], None] = lambda name, message: None


EXCHANGES: dict[str, Exchange] = {
    "allreduce": Exchange(allreduce),
    "allgather": Exchange(allgather, _check_allgather),
    "two_shot": Exchange(two_shot, _check_two_shot),
    "hierarchical": Exchange(hierarchical, _check_hierarchical),
}
"""By the name that compressors call it; ``allreduce`` is Horovod's own."""


def _ring_sum(hosts: Hosts, message_bytes: int, count: int) -> Collective:
    """A rank passes on each part but one, twice, and adds its own to each but one."""
    counters = Counters()
    counters.add_allreduce(hosts.size, message_bytes)
    return Collective(
        "allreduce",
        counters.wire_bytes,
        *_in_a_ring(hosts, counters.wire_bytes),
        rounds=2 * (hosts.size - 1),
        added=count * (hosts.size - 1) / hosts.size,
    )


def _gathered(size: int, message_bytes: float) -> float:
    counters = Counters()
    counters.add_allgather(size, message_bytes)  # type: ignore[arg-type]  # a mean over ranks
    return counters.wire_bytes


def _in_a_ring(hosts: Hosts, sent: float) -> tuple[float, float]:
    # Host by host, so that one of a host's ranks sends to the next host.
    return sent if hosts.local > 1 else 0.0, sent if hosts.count > 1 else 0.0


@lru_cache(maxsize=4096)
def _parts(codec: Codec, count: int, owners: int) -> tuple[float, int]:
    """Bytes of the owners' payloads: their mean, and the largest."""
    lengths = Shards(count, owners).lengths()
    sizes = {length: codec.payload_bytes((length,)) if length else 0 for length in lengths}
    total = sum(ranks * sizes[length] for length, ranks in lengths.items())
    return total / owners, max(sizes.values())


def _message(
    shape: Shape, route: Route, cluster: Cluster, element_bytes: int
) -> tuple[Exchange, Message]:
    name = "allreduce" if route.dense else route.exchange
    if name not in EXCHANGES:
        raise ValueError(f"exchange: expected one of {', '.join(EXCHANGES)}, got {name!r}")
    cast = route.dense_dtype if route.dense else None
    message = Message(
        math.prod(shape),
        route.codec.payload_bytes(shape),
        route.codec,
        element_bytes,
        element_bytes if cast is None else np.dtype(cast).itemsize,
        Hosts(cluster.ranks, cluster.local),
    )
    return EXCHANGES[name], message
