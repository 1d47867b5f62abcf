"""Factors of ranks that leave and join, and what takes no codec without payloads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import ErrorFeedback, OneBit, PowerSGD, Route
from hvd_compress.engine.state import unsent
from hvd_compress.papers import ParallelGroup
from tests.ddp.probes import assert_equal_on_all_ranks
from tests.ranks import on_ranks
from tests.torch_models import targets

SHAPES = {"a": (40, 60), "b": (3000,)}


def _call(compressor: hvdc.Compressor, step: int, group: dist.ProcessGroup | None = None) -> None:
    tensors = targets(SHAPES, dist.get_rank(), step)
    hvdc.all_reduce(list(tensors.values()), compressor, key=list(tensors))
    assert_equal_on_all_ranks(tensors, group)


def _unsent(compressor: hvdc.Compressor) -> torch.Tensor:
    return unsent(compressor.state_dict()["tensors"]["a"], SHAPES["a"])


def _factor(compressor: hvdc.Compressor) -> torch.Tensor:
    factor: torch.Tensor = compressor.state_dict()["tensors"]["a"]["factor"]
    return factor.clone()


@on_ranks(3, launcher="torchrun", alone=True)
def test_a_rank_leaves_and_another_one_joins() -> None:
    """Nothing is lost, and ranks that stay keep their factors."""
    pair, compressor = dist.new_group([0, 1]), hvdc.Compressor(PowerSGD(2), threshold=0)
    for step in range(3):
        _call(compressor, step)
    states: list[dict[str, object]] = [{} for _ in range(3)]
    dist.all_gather_object(states, copy.deepcopy(compressor.state_dict()))
    due, kept = _unsent(compressor), _factor(compressor)
    dist.all_reduce(due)
    if dist.get_rank() < 2:
        compressor.rebind(pair, lost=states[2:])
        rest = _unsent(compressor)
        dist.all_reduce(rest, group=pair)
        torch.testing.assert_close(rest / 2, due / 3)
        assert torch.equal(_factor(compressor), kept)
        _call(compressor, 3, pair)
        assert not torch.equal(_factor(compressor), kept)
        before = _unsent(compressor)
    else:
        compressor, before = (
            hvdc.Compressor(PowerSGD(2), threshold=0),
            torch.zeros(2400, device="cpu"),
        )
    compressor.rebind()
    rest = _unsent(compressor)
    for one in (before, rest):
        dist.all_reduce(one)
    torch.testing.assert_close(rest / 3, before / 2)
    _call(compressor, 4)
    assert_equal_on_all_ranks({"factor": _factor(compressor)})


@on_ranks(2, launcher="torchrun")
def test_what_sends_payloads_says_so() -> None:
    with pytest.raises(ValueError, match=r"ParallelGroup.codec: expected a codec that writes pay"):
        ParallelGroup(PowerSGD())


def test_feedback_that_no_tensor_could_have_is_an_error_where_a_compressor_is_made() -> None:
    rounded, growing = ErrorFeedback(residual_dtype="bfloat16"), ErrorFeedback(1.0, 0.5)
    for codec, feedback, message in (
        (PowerSGD(2), rounded, "expected residual_dtype='float32' for PowerSGD"),
        (OneBit(), growing, "expected alpha <= beta = 0.5 for onebit"),
    ):
        with pytest.raises(ValueError, match=message):
            hvdc.Compressor(codec, feedback=feedback)
        with pytest.raises(ValueError, match=message):
            hvdc.Compressor("int8", layers={"*": Route(codec, feedback)})
