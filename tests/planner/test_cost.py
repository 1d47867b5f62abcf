"""Limits of the model of one tensor, and in which direction everything pulls."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import FP16, NoCompression, OneBit
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.routing import Route
from hvd_compress.planner.cost import seconds
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link
from tests.planner.strategies import (
    CLUSTERS,
    COUNTS,
    ENCODED,
    LINKS,
    ROUTES,
    SPEEDS,
    TRIES,
    route_of,
)

FREE = Link(math.inf)
FACTORS = st.floats(1, 100)


@TRIES
@given(COUNTS, ROUTES, SPEEDS, LINKS)
def test_one_worker_has_nothing_to_do(
    count: int, route: Route, speed: CodecSpeed, link: Link
) -> None:
    assert seconds((count,), route, speed, Cluster(1, 1, link, link, 1.0)).total == 0


@TRIES
@given(COUNTS, ROUTES, SPEEDS, CLUSTERS)
def test_a_free_network_leaves_the_codec(
    count: int, route: Route, speed: CodecSpeed, cluster: Cluster
) -> None:
    free = dataclasses.replace(cluster, between=FREE, within=FREE, start=0.0)
    slow = seconds((count,), route, speed, cluster)
    fast = seconds((count,), route, dataclasses.replace(speed, add=0.0), free)
    assert fast.wire == 0
    assert fast.encode == slow.encode and fast.decode <= slow.decode


@TRIES
@given(COUNTS, ROUTES, SPEEDS, CLUSTERS, FACTORS)
def test_a_worse_link_is_never_faster(
    count: int, route: Route, speed: CodecSpeed, cluster: Cluster, factor: float
) -> None:
    before = seconds((count,), route, speed, cluster).total
    for field in ("between", "within"):
        link = getattr(cluster, field)
        for worse in (
            Link(link.bandwidth / factor, link.latency),
            Link(link.bandwidth, link.latency * factor),
        ):
            after = seconds((count,), route, speed, dataclasses.replace(cluster, **{field: worse}))
            assert after.total >= before * (1 - 1e-9)


@TRIES
@given(COUNTS, ROUTES, SPEEDS, LINKS, st.integers(1, 30))
def test_more_hosts_are_never_faster(
    count: int, route: Route, speed: CodecSpeed, link: Link, hosts: int
) -> None:
    """On the wire, one rank a host; what owners compute is less with more of them.

    But for parts: theirs are whole grains, and with a rank more the largest can be smaller by one.
    """
    few, many = (
        seconds((count,), route, speed, Cluster(k, 1, link)).wire for k in (hosts, hosts + 1)
    )
    grain = 0.0
    if route.exchange == "two_shot":
        grain = 2 * hosts * route.codec.payload_bytes((1024,)) / link.bandwidth
    assert many >= few * (1 - 1e-9) - grain


@TRIES
@given(COUNTS, COUNTS, ROUTES, SPEEDS, CLUSTERS)
def test_more_elements_are_never_faster(
    one: int, other: int, route: Route, speed: CodecSpeed, cluster: Cluster
) -> None:
    small, large = (
        seconds((count,), route, speed, cluster).total for count in sorted((one, other))
    )
    assert large >= small * (1 - 1e-9)


@TRIES
@given(COUNTS, ENCODED, SPEEDS, CLUSTERS, FACTORS)
def test_codec_time_is_proportional_to_its_speed(
    count: int, route: Route, speed: CodecSpeed, cluster: Cluster, factor: float
) -> None:
    slower = CodecSpeed(speed.encode * factor, speed.decode * factor, speed.add * factor)
    fast, slow = (seconds((count,), route, s, cluster) for s in (speed, slower))
    assert math.isclose(slow.encode, fast.encode * factor, abs_tol=1e-12)
    assert math.isclose(slow.decode, fast.decode * factor, abs_tol=1e-12)


def test_known_times() -> None:
    """Two hosts, a million elements, 100 MB/s, 1 ms: by hand."""
    count, cluster = 1_000_000, Cluster(2, 1, Link(1e8, 1e-3), start=1e-2)
    speed = CodecSpeed(encode=3e-9, decode=1e-9, add=2e-9)
    dense = seconds((count,), Route(NoCompression(), OFF), speed, cluster)
    # A ring of two: two messages of half of the gradient each.
    assert math.isclose(dense.wire, 1e-2 + 2 * 1e-3 + 4e6 / 1e8 + 2e-9 * count / 2)
    assert dense.encode == dense.decode == 0
    half = seconds((count,), Route(FP16(), OFF), speed, cluster)
    assert math.isclose(half.wire, 1e-2 + 2 * 1e-3 + 2e6 / 1e8 + 2e-9 * count / 2)
    assert math.isclose(half.encode, 3e-3) and math.isclose(half.decode, 1e-3)
    codec = OneBit()
    gather = seconds((count,), route_of(codec, "allgather"), speed, cluster)
    assert math.isclose(gather.wire, 1e-2 + 1e-3 + codec.payload_bytes((count,)) / 1e8)
    assert math.isclose(gather.decode, 2e-3)


def test_hosts_share_their_link() -> None:
    """Four hosts of four ranks: what crosses a host's link, as the table in docs/exchanges.md."""
    count, cluster = 10_000_000, Cluster(4, 4, Link(1e8), FREE)
    speed = CodecSpeed()
    payload = OneBit().payload_bytes((count,))
    crossing = {"allgather": 15, "two_shot": 4 * 3 / 4 + 15 / 16, "hierarchical": 3}
    for exchange, payloads in crossing.items():
        wire = seconds((count,), route_of(OneBit(), exchange), speed, cluster).wire
        assert math.isclose(wire, payloads * payload / 1e8, rel_tol=2e-3), exchange
