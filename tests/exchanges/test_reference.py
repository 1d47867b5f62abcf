"""The reference of the exchanges: what can be known of it without writing it down a second time."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from hvd_compress.codecs import (
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    Ternary,
)
from hvd_compress.exchanges.reference import Simulation
from hvd_compress.exchanges.registry import EXCHANGES

SHAPES = {"a": (40, 70), "b": (3000,), "scalar": (), "empty": (0, 3)}
NONE = ErrorFeedback(0.0)
WEAK = ErrorFeedback(0.01, 1.0)
ROWS = {name: (ECQ(), WEAK) for name in EXCHANGES} | {"low_rank": (PowerSGD(2), ErrorFeedback())}
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def _gradients(step: int, size: int = 4) -> list[dict[str, np.ndarray]]:
    generators = [np.random.default_rng([step, rank]) for rank in range(size)]
    return [
        {name: one.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
        for one in generators
    ]


def _mean(gradients: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.mean([one[name] for one in gradients], axis=0)


def _unsent(simulation: Simulation, name: str, hosts: int) -> np.ndarray:
    """Returns the part of the gradients that all ranks have yet to add to the average."""
    total = np.zeros(SHAPES[name], np.float32).reshape(-1)
    for rank, (mine, owned) in enumerate(zip(simulation.residuals, simulation.owned, strict=True)):
        if name in mine:
            total += mine[name] / len(simulation.residuals)
        if name in owned:
            total[simulation.part(name, rank)] += owned[name] / hosts
    return total.reshape(SHAPES[name])


@pytest.mark.parametrize("exchange", ("allgather", "two_shot", "hierarchical"))
@pytest.mark.parametrize(("codec", "warmup"), ((NoCompression(), 0), (ECQ(), 2)))
def test_without_a_codec_it_is_the_mean(exchange: str, codec: Codec, warmup: int) -> None:
    simulation = Simulation(exchange, codec, NONE, SHAPES, 4, local=2, warmup_steps=warmup)
    gradients = _gradients(0)
    mean, total = simulation.average(gradients), simulation.average(gradients, 1.0)
    for name in SHAPES:
        np.testing.assert_allclose(mean[name], _mean(gradients, name), atol=1e-6)
        np.testing.assert_allclose(total[name], 4 * _mean(gradients, name), atol=4e-6)


@pytest.mark.parametrize(
    ("exchange", "inner"),
    [*((name, None) for name in EXCHANGES), ("hierarchical", Int8()), ("hierarchical", ECQ(3))],
)
def test_what_is_not_sent_is_kept(exchange: str, inner: Codec | None) -> None:
    simulation = Simulation(exchange, *ROWS[exchange], SHAPES, 4, local=2, inner=inner)
    received = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    due = copy.deepcopy(received)
    for step in range(3):
        gradients = _gradients(step)
        for name, got in simulation.average(gradients).items():
            received[name] += got
            due[name] += _mean(gradients, name)
    hosts = 2 if exchange == "hierarchical" else 1
    for name in SHAPES:
        unsent = _unsent(simulation, name, hosts)
        np.testing.assert_allclose(received[name] + unsent, due[name], atol=1e-5)
    assert (
        np.abs(unsent).max(initial=0) == 0 and np.abs(_unsent(simulation, "a", hosts)).max() > 0.1
    )


@pytest.mark.parametrize(
    ("one", "other"),
    (
        (("hierarchical", 3, 1), ("allgather", 3, 1)),
        (("integer_sum", 1, 1), ("allgather", 1, 1)),
    ),
)
def test_exchanges_that_are_the_same(
    one: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    """Hosts of one rank gather, and a single rank's levels are its payload's."""
    both = [
        Simulation(
            name, Ternary(), ErrorFeedback(0.1, 0.9), {"a": (1000,)}, size, local=local, seed=5
        )
        for name, size, local in (one, other)
    ]
    for step in range(3):
        gradients = [{"a": g["a"].reshape(-1)[:1000]} for g in _gradients(step, one[1])]
        got, expected = (simulation.average(gradients)["a"] for simulation in both)
        assert np.array_equal(got, expected)


@every_exchange
@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
def test_a_number_that_is_not_finite_drops_the_step(exchange: str, bad: float) -> None:
    simulation = Simulation(exchange, *ROWS[exchange], SHAPES, 4, local=2)
    simulation.average(_gradients(0))
    before = copy.deepcopy((simulation.residuals, simulation.owned))
    gradients = _gradients(1)
    gradients[3]["a"][20, 5] = bad
    got = simulation.average(gradients)
    assert np.isnan(got["a"][20, 5]) and np.isfinite(got["b"]).all()
    assert simulation.step == 2
    for old, new in zip(before, (simulation.residuals, simulation.owned), strict=True):
        for left, right in zip(old, new, strict=True):
            assert all(np.array_equal(left[name], right[name]) for name in left)


@every_exchange
def test_tensors_that_ranks_lack(exchange: str) -> None:
    simulations = [Simulation(exchange, *ROWS[exchange], SHAPES, 4, local=2) for _ in range(2)]
    for simulation in simulations:
        simulation.average(_gradients(0))
    before = copy.deepcopy(simulations[0].residuals)
    lacking, zeros = _gradients(1), _gradients(1)
    zeros[1]["a"][:] = 0
    del lacking[1]["a"]
    for gradients in (lacking, zeros):
        for one in gradients:
            del one["b"]
    got, expected = (s.average(g) for s, g in zip(simulations, (lacking, zeros), strict=True))
    assert got.keys() == {"a", "scalar", "empty"}
    assert np.array_equal(got["a"], expected["a"])
    for old, new in zip(before, simulations[0].residuals, strict=True):
        assert "b" not in old or np.array_equal(old["b"], new["b"])


def test_an_owner_step_sees_each_average_once() -> None:
    seen: dict[int, int] = {}

    def step(average: np.ndarray, state: dict[str, Any]) -> None:
        state["calls"] = state.get("calls", 0) + 1
        seen[average.size] = state["calls"]
        average[:] = 2.5

    simulation = Simulation("two_shot", OneBit(), NONE, {"a": (3000,)}, 2, owner_step=step)
    for turn in (1, 2):
        got = simulation.average([{"a": np.ones(3000)}, {"a": np.zeros(3000)}])
        assert (got["a"] == 2.5).all()
        assert seen == {1024: turn, 1976: turn}
    simulation.average([{"a": np.append(np.ones(2000), np.full(1000, np.inf))}] * 2)
    assert seen == {1024: 3, 1976: 2}


def test_a_sum_of_integers_is_unbiased() -> None:
    """Over many steps of the same gradients, whose scales differ between the ranks."""
    shapes, steps = {"a": (40, 17), "scalar": ()}, 300
    simulation = Simulation("integer_sum", Ternary(clip=None), NONE, shapes, 3)
    gradients = [
        {
            name: np.float32(10 ** (rank % 2))
            * one[name].reshape(-1)[: math.prod(shape)].reshape(shape)
            for name, shape in shapes.items()
        }
        for rank, one in enumerate(_gradients(1, 3))
    ]
    mean = {name: np.zeros(shape) for name, shape in shapes.items()}
    for _ in range(steps):
        for name, got in simulation.average(gradients).items():
            mean[name] += got / steps
    for name in shapes:
        everybody = np.abs([one[name] for one in gradients]).astype(float)
        # A rank's variance is |x| (unit - |x|), of levels that are 0 or one unit.
        unit = everybody.max()
        variance = (everybody * (unit - everybody)).sum(0) / 3**2 / steps
        error = np.abs(mean[name] - _mean(gradients, name))
        assert (error <= 5.5 * np.sqrt(variance) + 1e-6 * unit).all(), name
