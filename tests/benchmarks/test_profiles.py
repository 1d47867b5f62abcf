"""Profiles say where their numbers come from, and give back the rates that they hold."""

from __future__ import annotations

import math

import pytest

from benchmarks.predict import profiles
from benchmarks.predict.networks import NETWORKS


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
        computation = profile.rated(NETWORKS[network](), rate.measured_batch)
        assert math.isclose(rate.measured_batch / computation.seconds, rate.images_per_second)
        # More images a step do not make an image dearer: parameters are read once a step.
        more = profile.rated(NETWORKS[network](), 2 * rate.measured_batch).seconds
        assert computation.seconds < more <= 2 * computation.seconds
