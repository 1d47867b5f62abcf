"""The compressor that chooses by itself: alike on every rank, and no gradient lost by a change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.exchanges.routing import PLANNED_NAMES
from tests.again import initialize_again
from tests.planner import process_groups
from tests.planner.budgets import MOST_STEPS
from tests.planner.process_groups import EXACT, Tensors
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import Probe, assert_same_bits, targets, two_valued


class _Job(process_groups.Job):
    ends_late = False
    rank = property(lambda self: hvd.rank())
    size = property(lambda self: hvd.size())

    def __init__(self, **options: Any) -> None:
        self.model, self.compressor, self.optimizer = _start(**options)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        return exchange(self.model, self.optimizer, gradients)

    def everywhere(self, value: Any) -> list[Any]:
        return hvd.allgather_object(value, name="what ranks say")


SHAPES = _Job.shapes


def _start(**options: Any) -> tuple[Probe, hvdc.Auto, Any]:
    model = Probe(SHAPES)
    compressor = hvdc.Auto(model, **{"threshold": 100, **options})
    return model, compressor, distributed(model, compressor)


def _until_planned(compressor: hvdc.Auto, step: Callable[[int], object]) -> int:
    """Makes steps until there is a plan, and returns their number; more steps might measure anew."""
    for number in range(MOST_STEPS):
        step(number)
        if compressor._planned.planner.settled:
            return number + 1
    raise AssertionError(compressor.explain())


def _every_change_of_route_keeps_every_gradient(ways: int) -> None:
    job = _Job(codecs=EXACT, exchanges=("allgather", "two_shot", "hierarchical"))
    process_groups.every_change_of_route_keeps_every_gradient(job, ways)
    assert_identical_on_all_ranks(job.model)


def _ranks_agree_on_every_plan() -> None:
    job = _Job(codecs=EXACT)
    process_groups.ranks_agree_on_every_plan(job)
    assert_identical_on_all_ranks(job.model)


@on_ranks(2)
def test_changes_of_route_on_two_ranks() -> None:
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
    job = _Job(codecs=EXACT)
    process_groups.a_plan_is_saved(job, _Job(codecs=EXACT))
    fixed = hvdc.OneBit(Probe(SHAPES), threshold=100)
    _, anew, _ = _start()
    anew.load_state_dict(fixed.state_dict())
    assert not anew.settled
    _, narrower, _ = _start(codecs=("ternary",))
    narrower.load_state_dict(job.compressor.state_dict())
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
    assert len(set(hvd.allgather_object(compressor.explain(), name="plans"))) == 1


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
