"""The steps of each exchange, for one tensor: what a rank computes, and what it sends.

Bytes are those of :meth:`~hvd_compress.codecs.Codec.payload_bytes`, parts those of
:class:`~hvd_compress.exchange.shards.Shards`, and what a collective sends is what
:class:`~hvd_compress.exchange.counters.Counters` counts. To add an exchange: a function that lists its
steps, and its line in :data:`EXCHANGES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from hvd_compress.codecs import Codec, LevelCodec
from hvd_compress.codecs.base import Shape
from hvd_compress.codecs.packing import WORD_BITS
from hvd_compress.exchange import token
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.hosts import check as check_hierarchical
from hvd_compress.exchange.integer_sum import check as check_integer_sum
from hvd_compress.exchange.integer_sum import message_words
from hvd_compress.exchange.routing import check_gather
from hvd_compress.exchange.shards import Shards
from hvd_compress.exchange.two_shot import check as check_two_shot
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed

ALLTOALL_ROUNDS = 2
"""How much will come, and what comes: each is a message to every other rank, and all of them at once."""

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What a rank computes before, between and after its collectives, in elements."""

    encoded: float = 0.0
    decoded: float = 0.0
    added: float = 0.0


class Load(NamedTuple):
    """Bytes through connections, in each direction.

    Attributes:
        inside: through a rank's connection to the others of its host.
        leaving: through a host's connection to the others.
    """

    inside: float
    leaving: float


@dataclass(frozen=True)
class Collective:
    """One collective of an exchange.

    Attributes:
        kind: Horovod's operation.
        sent: bytes a rank sends, on average over the ranks: those of ``Counters.wire_bytes``.
        load: on average over the connections.
        busiest: on the connections with the most to do.
        rounds: messages that wait for each other; 0 where there is nobody to talk to.
        fusible: bytes that count against Horovod's fusion threshold, those of the result; None where it
            fuses none.
        added: elements that a rank adds on the way.
    """

    kind: Literal["allreduce", "allgather", "alltoall"]
    sent: float
    load: Load
    busiest: Load
    rounds: int
    fusible: float | None = None
    added: float = 0.0


Step = Work | Collective
"""Of an exchange, in the order in which they are done."""


@dataclass(frozen=True)
class Message:
    """One tensor that is to be exchanged.

    Attributes:
        shape: its shape.
        codec: what it is encoded with.
        element_bytes: of the gradient's own type.
        dense_bytes: of an element where Horovod reduces it itself.
        hosts: the ranks, more than one.
    """

    shape: Shape
    codec: Codec
    element_bytes: int
    dense_bytes: int
    hosts: Hosts

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def payload_bytes(self) -> int:
        """Of the whole tensor as one payload."""
        return self.codec.payload_bytes(self.shape)


def together(collectives: Sequence[tuple[Collective, CodecSpeed]], cluster: Cluster) -> float:
    """Seconds of one or several tensors' collectives as one message.

    Latency is paid once. Owners of small tensors take turns, so that several tensors load all connections
    alike, but not less than each of them loads its busiest.

    Args:
        collectives: alike, each with what its codec's numbers take to be added.
        cluster: ranks and links.
    """
    head = collectives[0][0]
    if not head.rounds:
        return 0.0
    inside = _loaded([(one.load.inside, one.busiest.inside) for one, _ in collectives])
    leaving = _loaded([(one.load.leaving, one.busiest.leaving) for one, _ in collectives])
    # A ring's round is over when its slowest message is there.
    slowest = cluster.between if leaving else cluster.within
    return (
        cluster.start
        + head.rounds * slowest.latency
        + max(inside / cluster.within.bandwidth, leaving / cluster.between.bandwidth)
        + sum(one.added * speed.add for one, speed in collectives)
    )


def tokens(count: int, cluster: Cluster) -> Sequence[Step]:
    """The sum of ``count`` tokens, which Horovod gets in the place of so many encoded gradients."""
    if cluster.ranks == 1:
        return ()
    numbers = count * len(token.make(0))
    return (_ring_sum(Hosts(cluster.ranks, cluster.local), FLOAT_BYTES * numbers, numbers),)


def allreduce(message: Message) -> Sequence[Step]:
    """Horovod's ring, after a cast where there is one."""
    ring = _ring_sum(message.hosts, message.dense_bytes * message.count, message.count)
    cast = message.count if message.dense_bytes != message.element_bytes else 0
    return Work(encoded=cast), ring, Work(decoded=cast)


def allgather(message: Message) -> Sequence[Step]:
    """Every payload goes round to all."""
    size, payload = message.hosts.size, message.payload_bytes
    return (
        Work(encoded=message.count),
        _ring_gather(message.hosts, payload, payload),
        Work(decoded=size * message.count),
    )


def two_shot(message: Message) -> Sequence[Step]:
    """Parts to their owners, who decode a payload of each rank, and averages back."""
    hosts, others = message.hosts, message.hosts.size - 1
    mean, largest = _parts(message.codec, message.count, hosts.size)
    # A rank sends all parts but its own; the owner of the largest receives it from all others.
    sent, received = others * mean, others * largest
    abroad = (hosts.size - hosts.local) / others
    first = Collective(
        "alltoall",
        sent,
        load=_load(hosts, sent, abroad * hosts.local * sent),
        busiest=_load(hosts, received, abroad * max(received, hosts.local * sent)),
        rounds=ALLTOALL_ROUNDS,
    )
    share = message.count / hosts.size
    return (
        Work(encoded=message.count),
        first,
        Work(decoded=hosts.size * share, encoded=share),
        _ring_gather(hosts, mean, largest),
        Work(decoded=message.count),
    )


def hierarchical(message: Message) -> Sequence[Step]:
    """Dense parts within a host, payloads of the host's averages between hosts, all of them within it."""
    hosts, local = message.hosts, message.hosts.local
    mean, largest = _parts(message.codec, message.count, local)
    dense = message.element_bytes * message.count
    within = Load(dense * (local - 1) / local, 0)
    between = _gathered(hosts.count, mean)
    # All ranks of a host send through its connection.
    crossing = Load(0, local * between)
    host = Hosts(local, local)
    share = message.count / local
    return (
        Collective(
            "alltoall", within.inside, within, within, rounds=ALLTOALL_ROUNDS if local > 1 else 0
        ),
        Work(added=local * share, encoded=share),
        Collective(
            "allgather",
            between,
            crossing,
            crossing,
            rounds=hosts.count - 1,
            fusible=hosts.count * mean,
        ),
        _ring_gather(host, hosts.count * mean, hosts.count * largest),
        Work(decoded=hosts.count * message.count),
    )


def integer_sum(message: Message) -> Sequence[Step]:
    """A pass for the norms, their maximum, levels made with it, and the levels' sum."""
    hosts, codec = message.hosts, message.codec
    assert isinstance(codec, LevelCodec)
    norms = codec.layout(message.shape).scales
    words = message_words(codec, message.shape, hosts.size)
    return (
        Work(added=message.count),
        _ring_sum(hosts, FLOAT_BYTES * norms, norms),
        Work(encoded=message.count),
        _ring_sum(hosts, WORD_BITS // 8 * words, words),
        Work(decoded=message.count),
    )


def _check_allgather(name: str, message: Message) -> None:
    check_gather(name, message.payload_bytes, message.hosts.size)


def _check_two_shot(name: str, message: Message) -> None:
    check_two_shot(name, message.codec, Shards(message.count, message.hosts.size))


def _check_hierarchical(name: str, message: Message) -> None:
    shards = Shards(message.count, message.hosts.local)
    check_hierarchical(name, message.codec, shards, message.hosts, message.element_bytes)


def _check_integer_sum(name: str, message: Message) -> None:
    check_integer_sum(name, message.codec, message.hosts.size)


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
    "integer_sum": Exchange(integer_sum, _check_integer_sum),
}
"""By the name that compressors call it; ``allreduce`` is Horovod's own."""


def _ring_sum(hosts: Hosts, message_bytes: int, count: int) -> Collective:
    """A rank passes on each part but one, twice, and adds its own to each but one."""
    counters = Counters()
    counters.add_allreduce(hosts.size, message_bytes)
    load = _load(hosts, counters.wire_bytes, counters.wire_bytes)
    return Collective(
        "allreduce",
        counters.wire_bytes,
        load,
        load,
        rounds=2 * (hosts.size - 1),
        fusible=message_bytes,
        added=count * (hosts.size - 1) / hosts.size,
    )


def _ring_gather(hosts: Hosts, mean_bytes: float, largest_bytes: float) -> Collective:
    """A rank passes on every message but one; in each round, everybody waits for the largest."""
    mean, largest = (_gathered(hosts.size, message) for message in (mean_bytes, largest_bytes))
    return Collective(
        "allgather",
        mean,
        load=_load(hosts, mean, mean),
        busiest=_load(hosts, largest, largest),
        rounds=hosts.size - 1,
        fusible=hosts.size * mean_bytes,
    )


def _load(hosts: Hosts, inside: float, leaving: float) -> Load:
    """As much of it as there are others to talk to, inside and outside of the host."""
    return Load(inside if hosts.local > 1 else 0, leaving if hosts.count > 1 else 0)


def _gathered(size: int, message_bytes: float) -> float:
    counters = Counters()
    counters.add_allgather(size, message_bytes)  # type: ignore[arg-type]  # a mean over ranks
    return counters.wire_bytes


@lru_cache(maxsize=4096)
def _parts(codec: Codec, count: int, owners: int) -> tuple[float, int]:
    """Bytes of the owners' payloads: their mean, and the largest."""
    lengths = Shards(count, owners).lengths()
    sizes = {length: codec.payload_bytes((length,)) if length else 0 for length in lengths}
    total = sum(ranks * sizes[length] for length, ranks in lengths.items())
    return total / owners, max(sizes.values())


def _loaded(loads: Sequence[tuple[float, float]]) -> float:
    return max(sum(mean for mean, _ in loads), max(busiest for _, busiest in loads))
