"""The load of a collective on a cluster's connections: bytes, and messages that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.exchanges.comm import Scope
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.steps import Computation, Message
from hvd_compress.ranks.counters import Kind, sent_bytes

ALLTOALL_LATENCIES = 2
"""The latencies of an ``all_to_all``: ranks first send lengths, then data, to all other ranks at once."""


class Load(NamedTuple):
    """The bytes through connections, in each direction.

    Attributes:
        inside: the bytes through a rank's connection to the other ranks on its host.
        leaving: the bytes through a host's connection to the other hosts.
    """

    inside: float
    leaving: float


@dataclass(frozen=True)
class Collective:
    """One collective of an exchange.

    Attributes:
        kind: the operation.
        sent: the bytes that a rank sends, averaged over the ranks, as in ``Counters.wire_bytes``.
        load: the average load of the connections.
        busiest: the load of the busiest connections.
        latencies: the number of messages that wait for each other; 0 if there is no other rank.
        fusible: the bytes of the result, which count towards Horovod's fusion threshold; None if Horovod
            does not fuse the operation.
        added: the number of elements that a rank adds up during the collective.
    """

    kind: Kind
    sent: float
    load: Load
    busiest: Load
    latencies: int
    fusible: float | None
    added: float


Stage = Computation | Collective
"""A stage of an exchange."""


def collective(message: Message, scope: Scope, hosts: Hosts) -> Collective:
    """The collective for a message among the ranks of a scope, in a cluster of several ranks.

    In a ring, each rank passes on the data that it receives, and all ranks wait for the largest message. In
    an ``all_to_all``, the owner of the largest part receives this part from all other ranks.
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
    """The load, without the part inside hosts of one rank, or the part that leaves the only host."""
    return Load(load.inside if hosts.local > 1 else 0, load.leaving if hosts.count > 1 else 0)
