"""Profiles say where their numbers come from, and give back the rates that they hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hvd_compress.codecs import ECQ, OneBit
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.routing import Route
from hvd_compress.perfmodel import profiles
from hvd_compress.perfmodel.networks import NETWORKS
from tests.perfmodel.strategies import route_of

RECORD = Path(__file__).parent.parent.parent / "benchmarks" / "records" / "codec-cpu.json"


@pytest.mark.parametrize("name", profiles.names())
def test_every_number_has_a_source(name: str) -> None:
    profile = profiles.load(name)
    parts = {"machines", "between", "within", "start", "memory", *profile.rates}
    assert profile.sources.keys() - {"codecs"} == parts
    assert ("codecs" in profile.sources) == bool(profile.speeds)
    assert all(len(source) > 20 for source in profile.sources.values())
    assert profile.rates.keys() <= NETWORKS.keys()


@pytest.mark.parametrize("name", profiles.names())
def test_one_worker_trains_at_the_measured_rate(name: str) -> None:
    profile = profiles.load(name)
    for network, rate in profile.rates.items():
        computation = profile.computation(NETWORKS[network](), rate.measured_batch)
        assert math.isclose(rate.measured_batch / computation.seconds, rate.images_per_second)
        # More images a step do not make an image dearer: parameters are read once a step.
        more = profile.computation(NETWORKS[network](), 2 * rate.measured_batch).seconds
        assert computation.seconds < more <= 2 * computation.seconds


def test_a_measured_step_takes_what_was_measured() -> None:
    profile = profiles.load("lab")
    for seconds in (1e-3, 0.4, 7.0):
        computation = profile.computation(NETWORKS["vgg_a"](), 8, seconds=seconds)
        assert math.isclose(computation.seconds, seconds)


def test_an_unknown_rate_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"profile lab: expected one of alexnet, got 'vgg_a'"):
        profiles.load("lab").computation(NETWORKS["vgg_a"](), 8)


def test_the_labs_codecs_are_those_of_the_record() -> None:
    recorded = {one.codec: one for one in profiles.speeds_of_record(json.loads(RECORD.read_text()))}
    packaged = profiles.load("lab").speeds
    assert len(packaged) >= 7
    for one in packaged:
        for field in ("encode", "encode_with_feedback", "decode"):
            assert math.isclose(
                getattr(one, field), getattr(recorded[one.codec], field), rel_tol=1e-3
            )


def test_speeds_fit_the_route() -> None:
    lab, gpu = profiles.load("lab"), profiles.load("ecq")
    (onebit,) = (one for one in lab.speeds if one.codec == OneBit())
    assert lab.speed(route_of(OneBit(), "two_shot")).encode == onebit.encode_with_feedback
    assert (
        lab.speed(Route(OneBit(), OFF, "allgather")).encode
        == onebit.encode
        < onebit.encode_with_feedback
    )
    # Another group was not measured; the same codec's speed stands for it.
    assert lab.speed(Route(OneBit(512), OFF, "allgather")).decode == onebit.decode
    # Nothing was measured there: memory traffic.
    assert math.isclose(gpu.speed(Route(ECQ(), OFF, "allgather")).encode, 12 / 3.46e11)


def test_clusters_are_full_machines() -> None:
    profile = profiles.load("ecq")
    assert [(c.hosts, c.local) for c in map(profile.cluster, (1, 4, 8, 64))] == [
        (1, 1),
        (1, 4),
        (1, 8),
        (8, 8),
    ]
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        profile.cluster(12)


def test_wrong_files_are_refused() -> None:
    with pytest.raises(ValueError, match="profile: expected one of ecq, lab"):
        profiles.load("cray")
    with pytest.raises(ValueError, match="schema 'hvd_compress/codec/1'"):
        profiles.speeds_of_record({"schema": "hvd_compress/train/1"})
