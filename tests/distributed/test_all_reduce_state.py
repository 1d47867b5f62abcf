"""``all_reduce``: residuals, their states, and what becomes of them."""

from __future__ import annotations

import copy
import io
import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from hvd_compress.distributed.rebinding import Place, _together
from hvd_compress.process_group.driver import Driver
from tests.contract.cases import FLAT, SHAPES, USUAL
from tests.distributed.all_reduce import make, reduce, residuals
from tests.elsewhere import elsewhere
from tests.ranks import on_ranks
from tests.torch_models import Simulation, assert_same_bits, targets


@on_ranks(2, launcher="torchrun")
def test_residuals_that_are_moved_in_memory() -> None:
    """Handing a state to another process moves it to shared memory, and frees the memory it was in."""

    def move(state: Any) -> None:
        if isinstance(state, torch.Tensor):
            state.share_memory_() if state.is_cpu else setattr(state, "data", state.data.clone())
        elif isinstance(state, dict):
            for one in state.values():
                move(one)

    for exchange in FLAT:
        moved, left = make(exchange), make(exchange)
        for step in range(6):
            tensors = targets(SHAPES, dist.get_rank(), step)
            assert_same_bits(reduce(moved, tensors), reduce(left, tensors))
            if step in (1, 2, 4):
                move(moved.state_dict())


@on_ranks(2, launcher="torchrun")
def test_residuals_are_settled_when_a_call_is_over() -> None:
    """Also where a collective is over before the thread that has started it goes on."""
    submit = Driver.submit

    def slowly(driver: Driver, *arguments: Any, **options: Any) -> None:
        submit(driver, *arguments, **options)
        time.sleep(0.05)

    compressor = make("allgather")
    simulation = Simulation("allgather", *USUAL["allgather"], SHAPES, 2)
    with mock.patch.object(Driver, "submit", slowly):
        for step in range(6):
            everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
            got = reduce(compressor, everybodys[dist.get_rank()])
            assert_same_bits(got, simulation.average(everybodys))


@on_ranks(2, launcher="torchrun")
def test_another_number_of_ranks() -> None:
    """By the rule of all frontends: what was not sent keeps its part in the average."""
    rank, shape = dist.get_rank(), {"a": (3000,)}
    for exchange, scale in (("allgather", 1), ("two_shot", 1), ("allgather", 8), ("two_shot", 8)):
        compressor = make(exchange)
        for step in range(2):
            reduce(compressor, targets(shape, rank, step))
        states: list[Any] = [None, None]
        dist.all_gather_object(states, compressor.state_dict())
        alone = make(exchange, process_group=_alone())
        # Numbers with a loss scale are the same gradients.
        scaled = copy.deepcopy(states)
        for one in (scaled[1]["tensors"]["a"], scaled[1]["tensors"]["a"]["owned"] or {}):
            if one.get("residual") is not None:
                one["residual"] *= scale
                one["residual_scale"] = float(scale)
        alone.load_resized(scaled)
        unsent = sum(state["tensors"]["a"]["residual"] for state in states) / 2
        for state in states:
            if (owned := state["tensors"]["a"]["owned"]) is not None:
                unsent[owned["begin"] : owned["end"]] += owned["residual"]
        kept = alone.state_dict()["tensors"]["a"]
        total = kept["residual"] + (kept["owned"]["residual"] if kept["owned"] else 0)
        torch.testing.assert_close(total.cpu(), unsent.cpu())
        assert alone.state_dict()["keys"] == {"a": {"dtype": "float32", "shape": [3000]}}
        got = reduce(alone, targets(shape, rank, 2))
        assert torch.isfinite(got["a"]).all()


@on_ranks(2, launcher="torchrun")
def test_states_of_another_device() -> None:
    """They are loaded into the memory in which the parameters are; the states may be anywhere."""
    rank, group = dist.get_rank(), _alone()
    options = {"owner_step": hvdc.AdaGrad()}
    compressor = make("two_shot", **options)
    for step in range(2):
        reduce(compressor, targets(SHAPES, rank, step))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, compressor.state_dict())
    resized = []
    for given in (states, elsewhere(states)):
        alone = make("two_shot", process_group=group, **options)
        alone.load_resized(given)
        resized.append(alone.state_dict())
        assert torch.isfinite(reduce(alone, targets(SHAPES, rank, 2))["a"]).all()
    torch.testing.assert_close(*(one["tensors"] for one in resized), rtol=0, atol=0)
    same = make("two_shot", **options)
    same.load_state_dict(elsewhere(states[rank]))
    gradients = targets(SHAPES, rank, 2)
    assert_same_bits(reduce(same, gradients), reduce(compressor, gradients))


def _alone() -> Any:
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


@on_ranks(2, launcher="torchrun")
def test_a_state_is_loaded_before_the_first_call_and_not_where_it_does_not_fit() -> None:
    rank = dist.get_rank()
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    for step in range(2):
        reduce(compressor, targets(SHAPES, rank, step))
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()))
    other = hvdc.Compressor(OneBit(), threshold=0)
    with pytest.raises(ValueError, match=f"expected rank {rank}, got {1 - rank}"):
        other.load_state_dict({**state, "rank": 1 - rank})
    assert not other.routes()
    with pytest.raises(ValueError, match="expected states of a compressor of hvd_compr"):
        other.load_state_dict({key: state[key] for key in state if key != "keys"})
    other.load_state_dict(state)
    assert_same_bits(residuals(other), residuals(compressor))
    assert other.routes() == compressor.routes()
    gradients = targets(SHAPES, rank, 2)
    assert_same_bits(reduce(other, gradients), reduce(compressor, gradients))
    third = hvdc.Compressor(OneBit(), threshold=0)
    reduce(third, {"b": targets(SHAPES, rank, 0)["b"]})
    with pytest.raises(ValueError, match="load a state before the first call"):
        third.load_state_dict(state)


@on_ranks(2, launcher="torchrun")
def test_the_codec_changes_for_later_keys_too() -> None:
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    with pytest.raises(hvdc.ExchangeError, match="expected a call of all_reduce before"):
        compressor.set_codec(Int8())
    hvdc.all_reduce(torch.randn(3000), compressor, key="first")
    compressor.set_codec(Int8())
    hvdc.all_reduce(torch.randn(3000), compressor, key="second")
    assert {route.codec for route in compressor.routes().values()} == {Int8()}
    with pytest.raises(ValueError, match="expected a pattern that matches"):
        compressor.set_codec(Int8(), layers="third")


@on_ranks(2, launcher="torchrun")
def test_the_last_call_can_be_dropped() -> None:
    """By all ranks, with all of its tensors, and no other call that was under way with it."""
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    simulations = [
        Simulation("allgather", OneBit(), ErrorFeedback(), {n: SHAPES[n] for n in names}, 2)
        for names in ("ab", "c")
    ]
    for step in range(4):
        everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
        sent = copy.deepcopy(everybodys)
        mine, works = everybodys[dist.get_rank()], []
        for names in ("ab", "c"):
            tensors = [mine[name] for name in names]
            works.append(hvdc.all_reduce(tensors, compressor, key=list(names), async_op=True))
        for work, names, simulation in zip(works, ("ab", "c"), simulations, strict=True):
            work.wait()
            assert_same_bits({name: mine[name] for name in names}, simulation.average(sent))
        if step == 1:
            compressor.drop_step()
            simulations[1].drop_step()
    if dist.get_rank() == 1:
        compressor.drop_step()
    with pytest.raises(hvdc.ExchangeError, match="calls of drop_step: 1 on rank 0, 2 on rank 1"):
        hvdc.all_reduce(torch.zeros(SHAPES["c"]), compressor, key="c")


def test_positions_go_on_from_the_largest() -> None:
    """In whatever order ranks are: noise that was used must not come again."""
    kind = {"dtype": "float32", "shape": [3]}

    def place(member: str, **positions: tuple[int, int]) -> Place:
        known = {key: (kind, *one) for key, one in positions.items()}
        return Place(member, 3 if positions else None, 0, known, ())

    told = [
        place("1", a=(3, 7)),
        place("2", a=(5, 6), b=(1, 1)),
        place("3", a=(4, 8)),
        place("new"),
    ]
    for order in itertools.permutations(told):
        assert _together(order) == {"a": (kind, 5, 8), "b": (kind, 1, 1)}
