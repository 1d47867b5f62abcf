"""What the model sends is what codecs, shards and counters say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, FP16, Codec, LevelCodec, NoCompression, OneBit, Ternary
from hvd_compress.codecs.registry import OFF
from hvd_compress.exchange import routing
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.integer_sum import message_words
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.perfmodel.cost import refusal, wire_bytes
from hvd_compress.perfmodel.exchanges import EXCHANGES
from hvd_compress.perfmodel.machines import Cluster, Link
from tests.perfmodel.strategies import CODECS, COUNTS, TRIES, route_of

LINK = Link(1e8)
HOSTS = st.integers(1, 6)
LOCALS = st.integers(1, 4)
SENDING = st.sampled_from([codec for codec in CODECS if not isinstance(codec, FP16)][:-1])


def _mean(per_rank: list[Counters]) -> float:
    return sum(counters.wire_bytes for counters in per_rank) / len(per_rank)


@TRIES
@given(COUNTS, HOSTS, LOCALS, st.sampled_from((2, 4)))
def test_allreduce(count: int, hosts: int, local: int, element_bytes: int) -> None:
    cluster = Cluster(hosts, local, LINK)
    for codec, width in ((NoCompression(), element_bytes), (FP16(), 2)):
        counters = Counters()
        counters.add_allreduce(cluster.ranks, width * count)
        sent = wire_bytes((count,), Route(codec, OFF), cluster, element_bytes=element_bytes)
        assert math.isclose(sent, counters.wire_bytes)


@TRIES
@given(COUNTS, SENDING, HOSTS, LOCALS)
def test_allgather(count: int, codec: Codec, hosts: int, local: int) -> None:
    cluster = Cluster(hosts, local, LINK)
    counters = Counters()
    counters.add_allgather(cluster.ranks, codec.payload_bytes((count,)))
    sent = wire_bytes((count,), route_of(codec, "allgather"), cluster)
    assert math.isclose(sent, counters.wire_bytes)


@TRIES
@given(COUNTS, SENDING, HOSTS, LOCALS, st.integers(0, 50))
def test_two_shot(count: int, codec: Codec, hosts: int, local: int, number: int) -> None:
    """As ``TwoShot`` counts it on each rank."""
    cluster = Cluster(hosts, local, LINK)
    sizes = Shards(count, cluster.ranks, number).payload_bytes(codec)
    per_rank = []
    for own in sizes:
        counters = Counters()
        counters.add_alltoall(sum(sizes), own)
        counters.add_allgather(cluster.ranks, own)
        per_rank.append(counters)
    sent = wire_bytes((count,), route_of(codec, "two_shot"), cluster)
    assert math.isclose(sent, _mean(per_rank))


@TRIES
@given(COUNTS, SENDING, HOSTS, LOCALS, st.integers(0, 50), st.sampled_from((2, 4)))
def test_hierarchical(
    count: int, codec: Codec, hosts: int, local: int, number: int, element_bytes: int
) -> None:
    """As ``Hierarchical`` counts it on each rank."""
    cluster = Cluster(hosts, local, LINK)
    shards = Shards(count, local, number)
    per_rank = []
    for place, own in enumerate(shards.payload_bytes(codec)):
        counters = Counters()
        counters.add_alltoall(element_bytes * count, element_bytes * shards.length(place))
        counters.add_allgather(local, hosts * own)
        counters.add_allgather(hosts, own)
        per_rank.append(counters)
    sent = wire_bytes(
        (count,), route_of(codec, "hierarchical"), cluster, element_bytes=element_bytes
    )
    if cluster.ranks > 1:
        assert math.isclose(sent, _mean(per_rank))
    else:
        assert sent == 0


@TRIES
@given(COUNTS, st.sampled_from((Ternary(), ECQ())), HOSTS, LOCALS)
def test_integer_sum(count: int, codec: LevelCodec, hosts: int, local: int) -> None:
    """As ``IntegerSum`` counts it on each rank."""
    cluster = Cluster(hosts, local, LINK)
    counters = Counters()
    counters.add_allreduce(cluster.ranks, 4 * codec.layout((count,)).scales)
    counters.add_allreduce(cluster.ranks, 4 * message_words(codec, (count,), cluster.ranks))
    sent = wire_bytes((count,), route_of(codec, "integer_sum"), cluster)
    assert math.isclose(sent, counters.wire_bytes)


def test_shapes_count_where_the_codec_looks_at_them() -> None:
    route = route_of(OneBit(group="column"), "allgather")
    cluster = Cluster(2, 1, LINK)
    for shape in ((100, 50), (50, 100)):
        assert wire_bytes(shape, route, cluster) == route.codec.payload_bytes(shape)


def test_every_exchange_has_its_model() -> None:
    assert EXCHANGES.keys() == {"allreduce", *routing.EXCHANGES}


@pytest.mark.parametrize(
    ("exchange", "codec", "count", "cluster", "words"),
    (
        ("allgather", OneBit(), 2**31, Cluster(16, 1, LINK), "bytes in one gather"),
        ("two_shot", OneBit(), 10**6, Cluster(2**16, 1, LINK), "65535 ranks"),
        ("two_shot", OneBit(group="row"), 10**6, Cluster(2, 1, LINK), "contiguous groups"),
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
