"""The model's messages are those of codecs, shards and counters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import (
    BF16,
    ECQ,
    FP16,
    Codec,
    Int8,
    LevelCodec,
    NoCompression,
    OneBit,
    PowerSGD,
    Ternary,
)
from hvd_compress.codecs.base import as_matrix
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.integer_sum import bits_of
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import Route
from hvd_compress.exchanges.shards import Shards
from hvd_compress.exchanges.steps import Gradient
from hvd_compress.planner.collectives import Collective
from hvd_compress.planner.cost import refusal, stages_of, wire_bytes
from hvd_compress.planner.machines import Cluster, Link
from hvd_compress.ranks.counters import Counters
from tests.planner.strategies import CODECS, COUNTS, TRIES, route_of

LINK = Link(1e8)
HOSTS = st.integers(1, 6)
LOCALS = st.integers(1, 4)
SENDING = tuple(codec for codec in CODECS if not isinstance(codec, FP16 | NoCompression))


def _mean(per_rank: list[Counters]) -> float:
    return sum(counters.wire_bytes for counters in per_rank) / len(per_rank)


@TRIES
@given(COUNTS, HOSTS, LOCALS, st.sampled_from((2, 4)))
def test_allreduce(count: int, hosts: int, local: int, element_bytes: int) -> None:
    cluster = Cluster(hosts, local, LINK)
    for codec, width in ((NoCompression(), element_bytes), (FP16(), 2)):
        counters = Counters()
        counters.add_allreduce(cluster.ranks, width * count)
        sent = wire_bytes(
            (count,), Route(codec, OFF, "allgather"), cluster, element_bytes=element_bytes
        )
        assert math.isclose(sent, counters.wire_bytes)


def _allgather(g: Gradient, number: int) -> list[Counters]:
    counters = Counters()
    counters.add_allgather(g.hosts.size, g.codec.payload_bytes(g.shape))
    return [counters]


def _two_shot(g: Gradient, number: int) -> list[Counters]:
    sizes = Shards(g.count, g.hosts.size, number).payload_bytes(g.codec)
    per_rank = []
    for own in sizes:
        counters = Counters()
        counters.add_alltoall(sum(sizes), own)
        counters.add_allgather(g.hosts.size, own)
        per_rank.append(counters)
    return per_rank


def _hierarchical(g: Gradient, number: int) -> list[Counters]:
    shards = Shards(g.count, g.hosts.local, number)
    per_rank = []
    for local_rank, own in enumerate(shards.payload_bytes(g.codec)):
        counters, width = Counters(), g.element_bytes
        if g.inner is None:
            parts = [width * shards.length(owner) for owner in range(g.hosts.local)]
        else:
            parts = shards.payload_bytes(g.inner)
        counters.add_alltoall(sum(parts), parts[local_rank])
        counters.add_allgather(g.hosts.local, g.hosts.count * own)
        counters.add_allgather(g.hosts.count, own)
        per_rank.append(counters)
    return per_rank


def _integer_sum(g: Gradient, number: int) -> list[Counters]:
    assert isinstance(g.codec, LevelCodec)
    words = g.codec.level_words(g.shape, bits_of(g.codec, g.hosts.size))
    counters = Counters()
    counters.add_allreduce(g.hosts.size, 4 * g.codec.layout(g.shape).scales)
    counters.add_allreduce(g.hosts.size, 4 * words)
    return [counters]


def _low_rank(g: Gradient, number: int) -> list[Counters]:
    assert isinstance(g.codec, PowerSGD)
    counters = Counters()
    for elements in as_matrix(g.shape):
        counters.add_allreduce(g.hosts.size, 4 * g.codec.rank * elements)
    return [counters]


COUNTED = {
    "allgather": (SENDING, _allgather),
    "two_shot": (SENDING, _two_shot),
    "hierarchical": (SENDING, _hierarchical),
    "integer_sum": ((Ternary(), ECQ()), _integer_sum),
    "low_rank": ((PowerSGD(), PowerSGD(1)), _low_rank),
}
"""For each exchange, codecs, and what the ranks count of one gradient with a number."""


@pytest.mark.parametrize("exchange", EXCHANGES)
@TRIES
@given(COUNTS, HOSTS, LOCALS, st.integers(0, 50), st.sampled_from((2, 4)), st.data())
def test_exchanges(
    exchange: str, count: int, hosts: int, local: int, number: int, width: int, data: st.DataObject
) -> None:
    codecs, counted = COUNTED[exchange]
    codec, cluster = data.draw(st.sampled_from(codecs)), Cluster(hosts, local, LINK)
    inner = data.draw(st.sampled_from((None, Int8(), BF16()))) if counted is _hierarchical else None
    route = Route(codec, exchange=exchange, inner=inner)
    gradient = Gradient((count,), codec, width, Hosts(cluster.ranks, local), inner=inner)
    sent = wire_bytes((count,), route, cluster, element_bytes=width)
    assert math.isclose(sent, _mean(counted(gradient, number)) if cluster.ranks > 1 else 0)


@TRIES
@given(COUNTS, HOSTS, LOCALS)
def test_hosts_send_and_receive_through_one_connection(count: int, hosts: int, local: int) -> None:
    """No connection carries more than its host's ranks send, and the busiest no less than the mean."""
    cluster = Cluster(hosts, local, LINK)
    for exchange, (codecs, _) in COUNTED.items():
        for stage in stages_of((count,), route_of(codecs[0], exchange), cluster):
            if isinstance(stage, Collective):
                assert stage.load.leaving <= local * stage.sent * (1 + 1e-9)
                assert stage.busiest.leaving >= stage.load.leaving * (1 - 1e-9)
                assert stage.busiest.inside >= stage.load.inside * (1 - 1e-9)


def test_shapes_count_where_the_codec_looks_at_them() -> None:
    route = route_of(OneBit(group="column"), "allgather")
    cluster = Cluster(2, 1, LINK)
    for shape in ((100, 50), (50, 100)):
        assert wire_bytes(shape, route, cluster) == route.codec.payload_bytes(shape)


@pytest.mark.parametrize(
    ("exchange", "codec", "count", "cluster", "words"),
    (
        ("allgather", OneBit(), 2**31, Cluster(16, 1, LINK), "bytes in one gather"),
        ("two_shot", OneBit(), 10**6, Cluster(2**16, 1, LINK), "65535 ranks"),
        ("integer_sum", ECQ(127), 10**6, Cluster(5, 1, LINK), "at most 4 ranks"),
        ("hierarchical", OneBit(), 2**30, Cluster(2, 4, LINK), "bytes in one message"),
    ),
)
def test_refusals_are_those_of_the_exchanges(
    exchange: str, codec: Codec, count: int, cluster: Cluster, words: str
) -> None:
    reason = refusal("conv", (count,), route_of(codec, exchange), cluster)
    assert reason and reason.startswith("conv: expected") and words in reason
    taken = Ternary() if exchange == "integer_sum" else OneBit()
    assert refusal("conv", (5000,), route_of(taken, exchange), Cluster(2, 2, LINK)) is None
