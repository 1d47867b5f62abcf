"""Bytes on the wire follow the ring formulas."""

from __future__ import annotations

import math

from hvd_compress.ranks.counters import Counters


def test_ring_formulas() -> None:
    counters = Counters()
    counters.add_allgather(4, 1000)
    assert (counters.message_bytes, counters.wire_bytes) == (1000, 3000)
    counters.add_allreduce(4, 1000)
    assert (counters.message_bytes, counters.wire_bytes) == (2000, 4500)


def test_one_rank_sends_nothing() -> None:
    counters = Counters()
    counters.add_allgather(1, 1000)
    counters.add_allreduce(1, 1000)
    assert counters.wire_bytes == 0


def test_parts_for_oneself_stay_at_home() -> None:
    counters = Counters()
    counters.add_alltoall(1000, 250)
    assert (counters.message_bytes, counters.wire_bytes) == (1000, 750)


def test_quotients_of_nothing_are_nan() -> None:
    counters = Counters()
    assert math.isnan(counters.ratio) and math.isnan(counters.per_step.message_bytes)
    counters.add_allreduce(2, 100)
    counters.steps, counters.uncompressed_bytes = 4, 1000
    assert (counters.ratio, counters.per_step.message_bytes) == (0.1, 25)
