"""The compressor that chooses by itself: alike on every rank, and no gradient lost by a change."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from hvd_compress.exchanges.routing import PLANNED_NAMES, UNCOMPRESSED_ROUTE
from tests.again import initialize_again
from tests.planner.budgets import MOST_STEPS, unlimited
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import Probe, assert_same_bits, targets, two_valued

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "small": (50,)}
EXACT = ("onebit", Route(Int8("linear"), ErrorFeedback()))
"""Codecs with full error feedback: what they do not send now they send later."""


def _start(**options: Any) -> tuple[Probe, hvdc.Auto, Any]:
    model = Probe(SHAPES)
    compressor = hvdc.Auto(model, **{"threshold": 100, **options})
    return model, compressor, distributed(model, compressor)


def _everywhere(text: str) -> set[str]:
    """Returns each rank's value."""
    return set(hvd.allgather_object(text, name="what ranks say"))


def _until_planned(compressor: hvdc.Auto, step: Callable[[int], object]) -> int:
    """Makes steps until there is a plan, and returns their number; more steps might measure anew."""
    for number in range(MOST_STEPS):
        step(number)
        if compressor._planned.planner.settled:
            return number + 1
    raise AssertionError(compressor.explain())


class _Ledger:
    """Gradients that were computed, and gradients that came back."""

    def __init__(self) -> None:
        self.due = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def step(self, model: Probe, optimizer: Any, step: int, scale: float = 1.0) -> None:
        gradients = [targets(SHAPES, r, step, scale) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        for name in SHAPES:
            self.due[name] += sum(g[name] for g in gradients) / hvd.size()
            self.sent[name] += got[name]

    def assert_balanced(self) -> None:
        for name in SHAPES:
            assert torch.allclose(self.sent[name], self.due[name], atol=1e-3), name


def _every_change_of_route_keeps_every_gradient(ways: int) -> None:
    exchanges = ("allgather", "two_shot", "hierarchical")
    model, compressor, optimizer = _start(codecs=EXACT, exchanges=exchanges)
    ledger = _Ledger()
    choices = [tensor.choices for tensor in compressor._planned.tensors]
    assert [len(routes) for routes in choices] == [ways, ways, ways, 1]
    # Every tensor takes another way in every step, all of them in the end, and each its own.
    orders = (*range(ways), 2, 0, 3, 1, 4, 0)
    for step, turn in enumerate(orders):
        plan = [routes[(turn + i) % len(routes)] for i, routes in enumerate(choices)]
        compressor._planned.apply(tuple(plan))
        ledger.step(model, optimizer, step)
    assert compressor.residual_norm() > 0
    compressor._planned.apply((UNCOMPRESSED_ROUTE,) * len(SHAPES))
    ledger.step(model, optimizer, len(orders), scale=0.0)
    assert compressor.residual_norm() == 0
    ledger.assert_balanced()
    assert_identical_on_all_ranks(model)


def _ranks_agree_on_every_plan() -> None:
    model, compressor, optimizer = _start(codecs=EXACT)
    ledger = _Ledger()
    plans = []

    def one_step(number: int) -> None:
        ledger.step(model, optimizer, number)
        plans.append(str(compressor.routes()))

    with unlimited():
        steps = _until_planned(compressor, one_step)
    assert len(_everywhere("\n".join(plans))) == 1
    assert len(set(plans)) > 1, "several plans were tried"
    text = compressor.explain()
    assert _everywhere(text) == {text}
    assert "decided" in text and "none" in text and "onebit" in text
    assert all(re.search(rf"^.*: .*\b{name}\b", text, re.M) for name in SHAPES)
    assert_identical_on_all_ranks(model)

    compressor._planned.apply((UNCOMPRESSED_ROUTE,) * len(SHAPES))
    ledger.step(model, optimizer, steps, scale=0.0)
    ledger.assert_balanced()


@on_ranks(2)
def test_changes_of_route_on_two_ranks() -> None:
    _every_change_of_route_keeps_every_gradient(ways=5)


@on_ranks(3)
def test_changes_of_route_on_three_ranks() -> None:
    _every_change_of_route_keeps_every_gradient(ways=5)


@on_ranks(4, launcher="two hosts", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_changes_of_route_on_two_hosts() -> None:
    """The hierarchical exchange is among the choices, as process sets can be made at any time."""
    _every_change_of_route_keeps_every_gradient(ways=7)


@on_ranks(2)
def test_agreement_on_two_ranks() -> None:
    _ranks_agree_on_every_plan()


@on_ranks(3)
def test_agreement_on_three_ranks() -> None:
    _ranks_agree_on_every_plan()


@on_ranks(2)
def test_the_same_as_stock_whatever_is_planned() -> None:
    """1-bit codes gathered carry two-valued gradients without error, and so does no codec at all."""
    for options in ({}, {"op": hvd.Sum}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
        model, plain = Probe(SHAPES), Probe(SHAPES)
        compressor = hvdc.Auto(model, codecs=("onebit",), exchanges=("allgather",), threshold=100)
        optimizer = distributed(model, compressor, **options)
        reference = distributed(plain, hvd.Compression.none, **options)
        for step in range(25):
            gradients = two_valued(SHAPES, hvd.rank(), step)
            got = exchange(model, optimizer, gradients)
            assert_same_bits(got, exchange(plain, reference, gradients))


@on_ranks(2)
def test_planning_is_rare_once_there_is_a_plan() -> None:
    model, compressor, optimizer = _start()
    shared: list[list[str]] = []
    add = compressor._planned.planner._sum

    def listen(numbers: list[float], what: str) -> Any:
        shared[-1].append(what)
        return add(numbers, what)

    compressor._planned.planner._sum = listen

    def one_step(number: int) -> None:
        shared.append([])
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), number))

    steps = _until_planned(compressor, one_step)
    assert shared[:3] == [[]] * 3 and shared[-1] == ["planner step"]
    assert 2 <= len(shared[3]) <= 4, "one to three bursts"
    for number in range(steps, steps + 30):
        one_step(number)
    assert shared[steps:] == [[]] * 30


@on_ranks(2)
def test_a_plan_is_saved_and_gone_on_with() -> None:
    model, compressor, optimizer = _start()
    steps = _until_planned(
        compressor, lambda step: exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    )
    state = copy.deepcopy(compressor.state_dict())

    other, later, again = _start()
    other.load_state_dict(model.state_dict())
    later.load_state_dict(state)
    assert later._planned.planner.settled and later.routes() == compressor.routes()
    assert "goes on with the plan" in later.explain()
    gradients = targets(SHAPES, hvd.rank(), steps)
    assert_same_bits(exchange(other, again, gradients), exchange(model, optimizer, gradients))

    fixed = hvdc.OneBit(Probe(SHAPES), threshold=100)
    _, anew, _ = _start()
    anew.load_state_dict(fixed.state_dict())
    assert not anew._planned.planner.settled
    _, narrower, _ = _start(codecs=("ternary",))
    narrower.load_state_dict(state)
    routes = set(narrower.routes().values())
    assert all(route.uncompressed or route.codec.name == "ternary" for route in routes)


@on_ranks(2)
def test_states_of_another_number_of_ranks() -> None:
    model, compressor, optimizer = _start(codecs=EXACT)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))  # With the fewest bytes.
    states = hvd.allgather_object(compressor.state_dict(), name="states")
    _, later, _ = _start(codecs=EXACT)
    later.load_resized(states)
    assert not later._planned.planner.settled and later.residual_norm() > 0


@on_ranks(2)
def test_nothing_is_measured_while_warming_up() -> None:
    model, compressor, optimizer = _start(warmup_steps=3)
    for step in range(6):
        gradients = targets(SHAPES, hvd.rank(), step)
        exchange(model, optimizer, gradients)
        assert compressor._planned.planner.step == max(0, step - 2)
        assert (compressor.counters.encoded_elements == 0) == (step < 3)


@on_ranks(2)
def test_tensors_without_a_choice_go_as_they_are() -> None:
    shapes = {"wide": (4000,), "excluded": (5000,), "small": (10,)}
    model = Probe(shapes)
    model.wide = torch.nn.Parameter(torch.zeros(4000, dtype=torch.float64))
    plain = copy.deepcopy(model)
    compressor = hvdc.Auto(model, exclude=["excluded"])
    optimizer = distributed(model, compressor)
    reference = distributed(plain, hvd.Compression.none)
    for step in range(3):
        gradients = two_valued(shapes, hvd.rank(), step)
        gradients["wide"] = gradients["wide"].double()
        assert_same_bits(
            exchange(model, optimizer, gradients), exchange(plain, reference, gradients)
        )
    assert "nothing to choose" in compressor.explain()


@on_ranks(3)
def test_join() -> None:
    """Ranks run out of data at different times; the others plan nothing, and all go on planning later."""
    model, compressor, optimizer = _start(codecs=("onebit",), exchanges=("allgather",))
    plain = Probe(SHAPES)
    stock = distributed(plain, hvd.Compression.none)
    for m, o in ((plain, stock), (model, optimizer)):
        for step in range(2 if hvd.rank() == 1 else 12):
            exchange(m, o, two_valued(SHAPES, hvd.rank(), step))
        hvd.join()
    if hvd.rank() != 1:
        parameters = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, plain)]
        assert_same_bits(*parameters)
    assert not compressor.settled and compressor._planned.planner.step == 2
    _until_planned(
        compressor,
        lambda step: exchange(model, optimizer, two_valued(SHAPES, hvd.rank(), step % 8)),
    )


@on_ranks(3, alone=True)
def test_fewer_ranks() -> None:
    """After a reset, the compressor measures anew what is fastest among the remaining ranks."""
    model, compressor, optimizer = _start(codecs=("onebit",), exchanges=("allgather",))

    def step(number: int) -> None:
        exchange(model, optimizer, two_valued(SHAPES, hvd.rank(), number % 8))

    for number in range(6):
        step(number)
    if not initialize_again(hvd, 2):
        return
    compressor.rebind()
    assert not compressor.settled and compressor._planned.planner.step == 0
    _until_planned(compressor, step)
    assert len(_everywhere(compressor.explain())) == 1


@on_ranks(1)
def test_arguments() -> None:
    model = Probe(SHAPES)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "expected a sequence of codecs", {"codecs": "onebit"}),
        (ValueError, "expected one of", {"codecs": ("onebits",)}),
        (TypeError, "expected a codec, a Route, a codec's name or None, got 3", {"codecs": (3,)}),
        (TypeError, "expected a codec, a Route", {"codecs": ((OneBit(), 1.0),)}),
        (ValueError, "expected one of", {"exchanges": ("ring",)}),
        (ValueError, "expected one of .*got 'integer_sum'", {"exchanges": ("integer_sum",)}),
        (TypeError, "expected a sequence of names", {"exchanges": "allgather"}),
        (TypeError, "unexpected keyword", {"layers": {}}),
        (ValueError, "threshold", {"threshold": -1}),
    ]
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            hvdc.Auto(model, **options)
    compressor = hvdc.Auto(model, codecs=("onebit",), exchanges=PLANNED_NAMES)
    assert isinstance(compressor, hvdc.Auto)
    with pytest.raises(ValueError, match="which chooses among"):
        compressor.set_codec(OneBit())
    assert "there is one rank" in compressor.explain()
    compressor.load_state_dict(compressor.state_dict())
