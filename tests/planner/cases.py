"""Jobs to plan for."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from hvd_compress.codecs import FP16, ErrorFeedback, Int8, OneBit
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route
from hvd_compress.planner.machines import CodecSpeed
from hvd_compress.planner.measured import KINDS, Measured
from hvd_compress.planner.plans import PlannedTensor

OFF = ErrorFeedback(alpha=0.0)
HALVES = Route(FP16(), OFF)
GATHERED = Route(OneBit(), ErrorFeedback(), "allgather")
SHOTS = Route(OneBit(), ErrorFeedback(), "two_shot")
BYTES = Route(Int8(), OFF, "allgather")
ROUTES = (UNCOMPRESSED_ROUTE, HALVES, BYTES, GATHERED, SHOTS)

LARGE = PlannedTensor("large", (4096, 4096), 4, ROUTES)
SMALL = PlannedTensor("small", (100,), 4)


def measured(
    bandwidth: float,
    *,
    small: float = 1e-3,
    coding: float = 1e-9,
    hosts: int = 4,
    local: int = 1,
) -> Measured:
    """A job whose links are alike for all collectives, and its codecs, too."""
    sent = 2.0**19
    large = dict.fromkeys(KINDS, small + sent / bandwidth)
    speeds = {(r.codec, r.feedback): CodecSpeed(coding, coding) for r in ROUTES[1:]}
    return Measured(hosts, local, sent, small, large, speeds)


def _logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


tensors = st.lists(
    st.builds(
        PlannedTensor,
        name=st.sampled_from("abc"),
        shape=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
        element_bytes=st.just(4),
        choices=st.lists(st.sampled_from(ROUTES[1:]), unique=True).map(
            lambda r: (UNCOMPRESSED_ROUTE, *r)
        ),
    ),
    min_size=1,
    max_size=6,
)

jobs = st.builds(
    measured,
    _logarithmic(1e5, 1e11),
    small=_logarithmic(1e-5, 1e-2),
    coding=_logarithmic(1e-11, 1e-7),
    hosts=st.integers(2, 64),
    local=st.sampled_from([1, 2, 8]),
)
