"""Tensors, routes, machines and speeds to try the model with."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, FP16, Codec, Int8, NoCompression, OneBit, Ternary
from hvd_compress.exchanges.routing import EXCHANGE_NAMES, Route
from hvd_compress.planner.cost import refusal
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link

TRIES = settings(max_examples=60, deadline=None)
"""A busy machine is no failure."""

COUNTS = st.integers(1, 300_000)
CODECS = (OneBit(), Int8(), Ternary(), ECQ(), FP16(), NoCompression())


def route_of(codec: Codec, exchange: str) -> Route:
    """With the feedback of the codec's paper."""
    return Route(codec, exchange=exchange)


def _possible(route: Route) -> bool:
    return refusal("gradient", (1000,), route, Cluster(2, 1, Link(1.0))) is None


ROUTES = st.builds(route_of, st.sampled_from(CODECS), st.sampled_from(EXCHANGE_NAMES)).filter(
    _possible
)
ENCODED = ROUTES.filter(lambda route: not route.uncompressed)
SHORT = st.floats(0, 1e-2)
LINKS = st.builds(Link, st.floats(1e5, 1e11), SHORT)
SPEEDS = st.builds(CodecSpeed, *[st.floats(0, 1e-8)] * 3)
CLUSTERS = st.builds(Cluster, st.integers(1, 20), st.integers(1, 8), LINKS, LINKS, SHORT)
