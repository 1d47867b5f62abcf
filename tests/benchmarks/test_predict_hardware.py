"""Profiles: clusters of full machines, measured steps, and the speeds of codecs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.predict import hardware
from benchmarks.predict.hardware import CPU, GPU
from benchmarks.predict.layers import Layer, Network
from hvd_compress.codecs import ECQ, OneBit
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.routing import Route
from tests.planner.strategies import route_of

RECORD = Path(__file__).parent.parent.parent / "benchmarks" / "records" / "codec-cpu.json"


def test_a_measured_step_takes_what_was_measured() -> None:
    network = Network(
        "net",
        (
            Layer("wide", {"wide.weight": (4096, 25_088)}, 10**8),
            Layer("conv", {"conv.weight": (64, 3)}, 10**9),
        ),
    )
    for seconds in (1e-3, 0.4, 7.0):
        computation = CPU.computation(network, seconds)
        assert math.isclose(computation.seconds, seconds)


def test_the_cpus_codecs_are_those_of_the_record() -> None:
    recorded = {one.codec: one for one in hardware.speeds_of_record(json.loads(RECORD.read_text()))}
    packaged = CPU.speeds
    assert len(packaged) >= 7
    for one in packaged:
        for field in ("encode", "encode_with_feedback", "decode"):
            assert math.isclose(
                getattr(one, field), getattr(recorded[one.codec], field), rel_tol=1e-3
            )


def test_speeds_fit_the_route() -> None:
    (onebit,) = (one for one in CPU.speeds if one.codec == OneBit())
    assert CPU.speed(route_of(OneBit(), "two_shot")).encode == onebit.encode_with_feedback
    assert (
        CPU.speed(Route(OneBit(), OFF, "allgather")).encode
        == onebit.encode
        < onebit.encode_with_feedback
    )
    # Another group was not measured; the same codec's speed stands for it.
    assert CPU.speed(Route(OneBit(512), OFF, "allgather")).decode == onebit.decode
    # Nothing was measured there: memory traffic.
    assert math.isclose(GPU.speed(Route(ECQ(), OFF, "allgather")).encode, 12 / 3.2e11)


def test_clusters_are_full_machines() -> None:
    profile = dataclasses.replace(GPU, local=8)
    assert [(c.hosts, c.local) for c in map(profile.cluster, (1, 4, 8, 64))] == [
        (1, 1),
        (1, 4),
        (1, 8),
        (8, 8),
    ]
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        profile.cluster(12)
