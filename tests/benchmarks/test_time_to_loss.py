"""The time to a loss: steps that are interpolated, and shares with the intervals of steps and seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.intervals import mean
from benchmarks.models import MODELS
from benchmarks.models.torch import build
from benchmarks.pages.time_to_loss import Method, methods, steps_to, table
from benchmarks.trained.training import Case, Recipe, Training

_LINK = "100 Mbit/s"


def test_steps_are_interpolated_between_points() -> None:
    curve = [4.0, 3.0, 3.5, 2.0]
    found = [steps_to(curve, 40, bits) for bits in (5.0, 4.0, 3.25, 3.0, 2.5)]
    assert found == pytest.approx([10.0, 10.0, 17.5, 20.0, 30 + 10 * 2 / 3])
    assert steps_to(curve, 40, 1.0) is None


def test_a_share_has_the_intervals_of_steps_and_of_seconds() -> None:
    none = Method({0: 100.0, 1: 120.0, 2: 90.0}, {_LINK: [1.0, 1.1, 0.9]})
    own = Method({0: 110.0, 1: 126.0, 2: 99.0, 3: 500.0}, {_LINK: [0.5, 0.6, 0.4]})
    share, low, high = own.share(none, _LINK)
    steps, seconds = mean(np.log([1.1, 1.05, 1.1])), mean(np.log([0.5, 6 / 11, 4 / 9]))
    assert math.log(share) == pytest.approx(steps.mean + seconds.mean)
    assert math.log(high / share) == pytest.approx(math.hypot(steps.half_width, seconds.half_width))
    assert math.log(share / low) == pytest.approx(math.log(high / share))


def test_a_method_that_misses_the_loss_with_one_seed_is_out() -> None:
    runs = [
        {"method": method, "seed": seed, "result": {"curve": curve}}
        for method, seed, curve in (
            ("none", 0, [3.0, 2.0]),
            ("none", 1, [3.0, 2.2]),
            ("int8", 0, [3.0, 2.0]),
            ("int8", 1, [3.0, 2.0]),
            ("onebit", 0, [3.0, 2.5]),
            ("onebit", 1, [3.0, 2.3]),
            ("qsgd", 0, [3.0, 2.0]),
        )
    ]
    seconds = {"none": [2.0, 2.0], "int8": [1.0, 1.1], "onebit": [1.0, 1.0], "qsgd": [1.0, 1.0]}
    clocks = {link: {"seconds": seconds} for link in (_LINK, "1 Gbit/s")}
    lines = table(methods({"recipe": {"steps": 20}, "runs": runs}, clocks)).rows
    assert [line[:3] for line in lines] == [
        ["none", "2", "17"],
        ["int8", "2", "16"],
        ["onebit", "", "not reached"],
    ]
    assert lines[0][3:5] == ["34", ""]


def test_the_model_on_the_clock_is_the_one_that_is_trained() -> None:
    trained = Training(Case("none", 0), Recipe()).model.state_dict()
    clocked = build("gpt_history").state_dict()
    assert {n: t.shape for n, t in trained.items()} == {n: t.shape for n, t in clocked.items()}
    assert sum(t.numel() for t in clocked.values()) == MODELS["gpt_history"].parameters
