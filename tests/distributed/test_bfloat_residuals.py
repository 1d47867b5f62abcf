"""Residuals in bfloat16: their memory, and states and codecs with residuals of the other dtype."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ranks import on_ranks
from tests.torch_models import targets

SHAPES = {"a": (40, 170), "b": (3000,)}
COUNT = sum(math.prod(shape) for shape in SHAPES.values())
HALVES = ErrorFeedback(residual_dtype="bfloat16")
DTYPES = {torch.float32: ErrorFeedback(), torch.bfloat16: HALVES}


def _compressor(dtype: torch.dtype, exchange: str = "allgather", **options: Any) -> Any:
    return hvdc.Compressor(Route(OneBit(), DTYPES[dtype], exchange), **{"threshold": 0, **options})


def _step(compressor: hvdc.Compressor, step: int) -> dict[str, torch.Tensor]:
    got = targets(SHAPES, dist.get_rank(), step)
    hvdc.all_reduce(list(got.values()), compressor, key=list(got))
    return got


def _kept(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    return {
        name: saved["residual"].clone()
        for name, saved in compressor.state_dict()["tensors"].items()
    }


@on_ranks(2, launcher="torchrun")
def test_they_take_half_the_memory() -> None:
    for dtype, expected in ((torch.float32, 8), (torch.bfloat16, 4)):
        compressor = _compressor(dtype)
        for step in range(3):
            _step(compressor, step)
        holders = compressor.keys.slots.values()
        both = [one for slot in holders for one in (slot.residual, slot.next_residual)]
        assert all(one is not None and one.dtype == dtype for one in both)
        assert sum(one.nbytes for one in both if one is not None) == expected * COUNT


@on_ranks(2, launcher="torchrun")
def test_a_state_of_the_other_dtype_goes_on() -> None:
    """From float32 with the nearest numbers of bfloat16, from bfloat16 with the same numbers."""
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        old, new = _compressor(before), _compressor(after)
        for step in range(3):
            _step(old, step)
            _step(new, 10 + step)
        state = copy.deepcopy(old.state_dict())
        new.load_state_dict(state)
        assert new.residual_norm() == pytest.approx(old.residual_norm(), rel=1e-12)
        other = _compressor(after)
        for saved in state["tensors"].values():
            saved["residual"] = saved["residual"].to(after)
        other.load_state_dict(state)
        got, expected = _step(new, 3), _step(other, 3)
        assert all(torch.equal(got[name], expected[name]) for name in SHAPES)
        assert all(one.dtype == after for one in _kept(new).values())


@on_ranks(2, launcher="torchrun")
def test_a_change_of_dtype_keeps_what_was_not_sent() -> None:
    compressor = _compressor(torch.float32)
    due = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)):
        if step:
            compressor.set_codec(Route(OneBit(), DTYPES[dtype], "allgather"))
        for number in range(2):
            arrived = _step(compressor, 2 * step + number)
            for name in SHAPES:
                everybodys = [targets(SHAPES, rank, 2 * step + number)[name] for rank in range(2)]
                due[name] += sum(one.double() for one in everybodys) / 2 - arrived[name].double()
        assert {one.dtype for one in _kept(compressor).values()} == {dtype}
    compressor.set_codec(None)
    for name, arrived in _step(compressor, 8).items():
        due[name] += sum(targets(SHAPES, rank, 8)[name].double() for rank in range(2)) / 2
        due[name] -= arrived.double()
        # What is left are roundings: at most a step of bfloat16 of a residual, in each of five steps.
        assert due[name].abs().max() < 5 * 2.0**-7 * 16
        assert due[name].norm() < 0.02 * math.sqrt(due[name].numel())
    assert compressor.residual_norm() == 0


@on_ranks(2, launcher="torchrun")
def test_states_of_another_number_of_ranks_are_added_up_in_float32() -> None:
    for exchange in ("allgather", "two_shot"):
        compressor = _compressor(torch.bfloat16, exchange)
        for step in range(3):
            _step(compressor, step)
        states: list[Any] = [None, None]
        dist.all_gather_object(states, compressor.state_dict())
        whole = {torch.bfloat16: states, torch.float32: copy.deepcopy(states)}
        for state in whole[torch.float32]:
            for saved in state["tensors"].values():
                for one in (saved, saved["owned"]):
                    if one is not None and one["residual"] is not None:
                        one["residual"] = one["residual"].float()
        four = [
            {**state, "rank": 2 * half + state["rank"], "size": 4}
            for half in range(2)
            for state in states
        ]
        if exchange == "allgather":
            made = _compressor(torch.bfloat16)
            made.load_resized(four)
            for name, kept in _kept(made).items():
                own = states[dist.get_rank()]["tensors"][name]["residual"].float()
                assert torch.equal(kept.cpu(), own.cpu())  # Half the sum of two that are alike.
        norms = []
        for some in whole.values():
            made = _compressor(torch.bfloat16, exchange)
            made.load_resized(some)
            norms.append(made.residual_norm())
        assert norms[0] == norms[1] > 0


@on_ranks(2, launcher="torchrun")
def test_ranks_with_residuals_of_different_dtypes() -> None:
    compressor = _compressor(list(DTYPES)[dist.get_rank()])
    with pytest.raises(hvdc.ExchangeError, match="residuals in bfloat16"):
        _step(compressor, 0)
