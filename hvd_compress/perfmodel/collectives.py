"""What a collective does to a cluster's connections: bytes, and messages that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import Scope
from hvd_compress.exchanges.steps import Computation, Message
from hvd_compress.ranks.counters import Kind, sent_bytes

ALLTOALL_LATENCIES = 2
"""Ranks first tell each other how much will come, then send it; each message goes to all at once."""


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
        kind: the operation.
        sent: bytes a rank sends, on average over the ranks: those of ``Counters.wire_bytes``.
        load: on average over the connections.
        busiest: on the connections with the most to do.
        latencies: messages that wait for each other; 0 where there is no other rank.
        fusible: bytes of the result, which count against Horovod's fusion threshold; None where Horovod
            does not fuse the operation.
        added: elements that a rank adds during the collective.
    """

    kind: Kind
    sent: float
    load: Load
    busiest: Load
    latencies: int
    fusible: float | None
    added: float


Stage = Computation | Collective
"""Of an exchange, in their order."""


def collective(message: Message, scope: Scope, hosts: Hosts) -> Collective:
    """The collective of a message among some of the ranks, of which there are several.

    In a ring, each rank passes on what it gets, and all wait for the largest message. In an ``all_to_all``,
    the owner of the largest part receives it from all others.
    """
    kind = message.kind
    ranks = {"all": hosts.size, "local": hosts.local, "cross": hosts.count}[scope]
    sent, most = message.sent(ranks), sent_bytes(kind, ranks, message.largest)
    load, busiest = Load(sent, sent), Load(most, most)
    if scope == "local":
        load, busiest = Load(sent, 0), Load(most, 0)
    elif scope == "cross":  # All ranks of a host send through its connection.
        load = busiest = Load(0, hosts.local * sent)
    elif kind == "all_to_all":
        abroad = (hosts.size - hosts.local) / (hosts.size - 1)
        load = Load(sent, abroad * hosts.local * sent)
        busiest = Load(most, abroad * max(most, hosts.local * sent))
    return Collective(
        kind,
        sent,
        _possible(load, hosts),
        _possible(busiest, hosts),
        latencies=_latencies(kind, ranks),
        fusible={"all_reduce": message.mean, "all_gather": ranks * message.mean}.get(kind),
        added=message.added * (ranks - 1) / ranks,
    )


def _latencies(kind: Kind, ranks: int) -> int:
    if kind == "all_to_all":
        return ALLTOALL_LATENCIES if ranks > 1 else 0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def _possible(load: Load, hosts: Hosts) -> Load:
    """The load, but none where a host has one rank, or where there is one host."""
    return Load(load.inside if hosts.local > 1 else 0, load.leaving if hosts.count > 1 else 0)
