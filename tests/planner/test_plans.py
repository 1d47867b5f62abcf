"""Predictions of whole plans."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from hvd_compress.codecs import Int8
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route
from hvd_compress.planner import cost
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link
from hvd_compress.planner.measured import HALF, KINDS, Measured
from hvd_compress.planner.plans import (
    PlannedTensor,
    label,
    predicted_best,
    price,
    price_of,
    propose,
    smallest,
    uniform,
)
from tests.planner.cases import (
    BYTES,
    GATHERED,
    HALVES,
    LARGE,
    OFF,
    ROUTES,
    SHOTS,
    SMALL,
    jobs,
    measured,
    tensors,
)


def _predicted(made, plan):
    return next(candidate.seconds for candidate in made if candidate.plan == plan)


@settings(deadline=None)
@given(tensors, jobs)
def test_nothing_is_predicted_to_be_faster_than_what_is_proposed_first(tensors, job):
    made = propose(tensors, job)

    assert [c.seconds for c in made] == sorted(c.seconds for c in made)
    assert made[0].seconds <= _predicted(made, (UNCOMPRESSED_ROUTE,) * len(tensors))
    for candidate in made:
        assert all(route in t.choices for t, route in zip(tensors, candidate.plan, strict=True))
    assert len({candidate.plan for candidate in made}) == len(made)


@settings(deadline=None)
@given(tensors, jobs)
def test_the_same_numbers_make_the_same_plans(tensors, job):
    copied = [dataclasses.replace(tensor) for tensor in tensors]
    speeds = dict(reversed(job.speeds.items()))
    assert propose(tensors, job) == propose(copied, dataclasses.replace(job, speeds=speeds))


@settings(deadline=None)
@given(tensors, jobs)
def test_every_tensor_takes_its_cheapest_way(tensors, job):
    cheapest = 0.0
    for tensor in tensors:
        prices = [price(tensor, route, job) for route in tensor.choices]
        cheapest += min(one.total for one in prices)
    assert propose(tensors, job)[0].seconds == pytest.approx(cheapest)


@settings(deadline=None)
@given(tensors)
def test_before_measurements_the_fewest_bytes_are_sent(tensors):
    ranks = Cluster(4, 1, Link(1.0))

    def sent(plan):
        return sum(cost.wire_bytes(t.shape, r, ranks) for t, r in zip(tensors, plan, strict=True))

    plan = smallest(tensors, 4, 1)
    assert all(sent(plan) <= sent(uniform(tensors, route)) for route in ROUTES)


def test_a_slow_network_compresses_and_a_fast_one_does_not():
    slow, fast = (propose([LARGE, SMALL], measured(rate))[0] for rate in (1e7, 1e11))
    assert slow.plan == (SHOTS, UNCOMPRESSED_ROUTE)
    assert fast.plan == (UNCOMPRESSED_ROUTE, UNCOMPRESSED_ROUTE)


def test_between_them_each_tensor_goes_its_own_way():
    """One tensor cannot take the other's best way, and is still worth a codec."""
    other = PlannedTensor("other", (2**20,), 4, (UNCOMPRESSED_ROUTE, GATHERED))
    first = propose([LARGE, other], measured(1e9, coding=5e-10))[0]
    assert first.label == "mixed" and first.plan == (SHOTS, GATHERED)


def test_prices_are_those_of_the_performance_model():
    job = measured(1e8, hosts=8)
    for route in ROUTES:
        whole = cost.seconds(LARGE.shape, route, job.speed(route), job.cluster("all_reduce"))
        one = price(LARGE, route, job)
        assert one.encode + one.decode == pytest.approx(whole.encode + whole.decode)
        assert one.wire == pytest.approx(whole.wire)
        assert one.sent == pytest.approx(cost.wire_bytes(LARGE.shape, route, job.cluster(HALF)))


def test_small_tensors_share_the_start_of_a_message():
    job = Measured(4, 1, 2.0**60, 1.0, dict.fromkeys(KINDS, 2.0))
    tiny = PlannedTensor("tiny", (2**19,), 4, ROUTES)
    assert price(LARGE, UNCOMPRESSED_ROUTE, job).wire == pytest.approx(1.0, rel=0.01)
    assert price(tiny, UNCOMPRESSED_ROUTE, job).wire == pytest.approx(0.5, rel=0.01)
    assert price(tiny, SHOTS, job).wire == pytest.approx(1.0, rel=0.01)


def test_half_precision_has_a_bandwidth_of_its_own():
    seconds = {"all_reduce": 1.0, HALF: 11.0, "all_gather": 1.0, "all_to_all": 1.0}
    job = Measured(2, 1, 1000.0, 0.5, seconds)
    assert job.bandwidth("all_reduce") == 2000
    assert price(LARGE, HALVES, job).wire > 5 * price(LARGE, UNCOMPRESSED_ROUTE, job).wire


def test_what_is_left_after_the_start_is_taken_out_may_be_noise():
    assert Measured(2, 1, 8.0, 5.0, {"all_reduce": 4.0}).bandwidth() == 8.0 / 0.4


@settings(deadline=None)
@given(tensors, jobs)
def test_a_prediction_alone_compresses_only_for_a_gain(tensors, job):
    plain = uniform(tensors, UNCOMPRESSED_ROUTE)
    chosen = predicted_best(tensors, job)
    least = propose(tensors, job)[0].seconds
    if chosen.plan == plain:
        assert least >= 0.9 * price_of(tensors, plain, job).total
    else:
        assert chosen.seconds == least < 0.9 * price_of(tensors, plain, job).total
    assert predicted_best(tensors, job, [job, job]) == chosen
    slow = {coding: CodecSpeed(1.0, 1.0) for coding in job.speeds}
    never = dataclasses.replace(job.with_links(1e9), small=0.0, speeds=slow)
    assert predicted_best(tensors, job, [job, never]).loss == 0


def test_a_single_host_has_no_network():
    job = dataclasses.replace(measured(1e6), hosts=1, local=4)
    assert price(LARGE, UNCOMPRESSED_ROUTE, job).wire == pytest.approx(
        price(LARGE, UNCOMPRESSED_ROUTE, measured(1e6, hosts=4)).wire
    )


def test_labels_tell_routes_apart():
    assert label(UNCOMPRESSED_ROUTE, ROUTES) == "none"
    assert label(HALVES, ROUTES) == "fp16"
    assert label(GATHERED, ROUTES) == "onebit allgather"
    linear = Route(Int8("linear"), OFF, "allgather")
    assert label(BYTES, [BYTES, linear]) != label(linear, [BYTES, linear])


def test_a_codec_without_a_measured_speed_is_free():
    job = measured(1e8)
    assert dataclasses.replace(job, speeds={}).speed(GATHERED) == CodecSpeed()
