"""Predictions of whole plans."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from hvd_compress.codecs import Int8
from hvd_compress.exchange.routing import DENSE, Route
from hvd_compress.perfmodel import cost
from hvd_compress.perfmodel.machines import CodecSpeed
from hvd_compress.planner.measured import HALF, KINDS, Measured, Probe, best
from hvd_compress.planner.plans import Tensor, label, price, propose, smallest, uniform
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
    assert made[0].seconds <= _predicted(made, (DENSE,) * len(tensors))
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
def test_where_nothing_is_hidden_every_tensor_takes_its_cheapest_way(tensors, job):
    job = dataclasses.replace(job, window=0.0)
    cheapest = 0.0
    for tensor in tensors:
        prices = [price(tensor, route, job) for route in tensor.choices]
        cheapest += min(one.codec + one.wire for one in prices)
    assert propose(tensors, job)[0].seconds == pytest.approx(cheapest)


@settings(deadline=None)
@given(tensors, jobs)
def test_where_all_is_hidden_nothing_is_compressed(tensors, job):
    first = propose(tensors, dataclasses.replace(job, window=1e9))[0]
    assert first.seconds == 0 and first.loss == 0


@settings(deadline=None)
@given(tensors)
def test_before_measurements_the_fewest_bytes_are_sent(tensors):
    ranks = cost.Cluster(4, 1, cost.Link(1.0))

    def sent(plan):
        return sum(cost.wire_bytes(t.shape, r, ranks) for t, r in zip(tensors, plan, strict=True))

    plan = smallest(tensors, 4, 1)
    assert all(sent(plan) <= sent(uniform(tensors, route)) for route in ROUTES)


def test_a_slow_network_compresses_and_a_fast_one_does_not():
    slow, fast = (propose([LARGE, SMALL], measured(rate))[0] for rate in (1e7, 1e11))
    assert slow.plan == (SHOTS, DENSE)
    assert fast.plan == (DENSE, DENSE)


def test_between_them_each_tensor_goes_its_own_way():
    """Where what can be hidden is nearly enough, only some of the tensors are worth a codec."""
    halves = [dataclasses.replace(LARGE, name=name) for name in "ab"]
    wire = price(LARGE, DENSE, measured(1e9)).wire
    job = measured(1e9, coding=1e-9, window=1.2 * wire)
    first = propose(halves, job)[0]
    assert first.label == "mixed" and first.plan.count(DENSE) == 1


def test_prices_are_those_of_the_performance_model():
    job = measured(1e8, hosts=8)
    for route in ROUTES:
        whole = cost.seconds(LARGE.shape, route, job.speed(route), job.cluster("allreduce"))
        one = price(LARGE, route, job)
        assert one.codec == pytest.approx(whole.encode + whole.decode)
        assert one.wire == pytest.approx(whole.wire)
        assert one.sent == pytest.approx(cost.wire_bytes(LARGE.shape, route, job.cluster(HALF)))


def test_small_tensors_share_the_start_of_a_message():
    job = Measured(4, 1, Probe(2.0**60, 1.0, dict.fromkeys(KINDS, 2.0)), {})
    tiny = Tensor("tiny", (2**19,), 4, ROUTES)
    assert price(LARGE, DENSE, job).wire == pytest.approx(1.0, rel=0.01)
    assert price(tiny, DENSE, job).wire == pytest.approx(0.5, rel=0.01)
    assert price(tiny, SHOTS, job).wire == pytest.approx(1.0, rel=0.01)


def test_half_precision_has_a_bandwidth_of_its_own():
    seconds = {"allreduce": 1.0, HALF: 11.0, "allgather": 1.0, "alltoall": 1.0}
    job = Measured(2, 1, Probe(1000.0, 0.5, seconds), {})
    assert job.probe.bandwidth("allreduce") == 2000
    assert price(LARGE, HALVES, job).wire > 5 * price(LARGE, DENSE, job).wire


def test_probes_are_combined_part_by_part():
    kinds = ("allreduce", HALF, "allgather", "alltoall")
    probes = [
        Probe(8.0, 3.0, dict(zip(kinds, times, strict=True)))
        for times in ((9.0, 5.0, 7.0, 4.0), (6.0, 8.0, 7.5, 3.5))
    ]
    assert best(probes).seconds == dict(zip(kinds, (6.0, 5.0, 7.0, 3.5), strict=True))
    # What is left after the start is taken out may be noise.
    assert Probe(8.0, 5.0, {"allreduce": 4.0}).bandwidth("allreduce") == 8.0 / 0.4


def test_a_single_host_has_no_network():
    job = dataclasses.replace(measured(1e6), hosts=1, local=4)
    assert price(LARGE, DENSE, job).wire == pytest.approx(
        price(LARGE, DENSE, measured(1e6, hosts=4)).wire
    )


def test_labels_tell_routes_apart():
    assert label(DENSE, ROUTES) == "none"
    assert label(HALVES, ROUTES) == "fp16"
    assert label(GATHERED, ROUTES) == "onebit allgather"
    linear = Route(Int8("linear"), OFF)
    assert label(BYTES, [BYTES, linear]) != label(linear, [BYTES, linear])


def test_a_codec_without_a_measured_speed_is_free():
    job = measured(1e8)
    assert dataclasses.replace(job, speeds={}).speed(GATHERED) == CodecSpeed()
