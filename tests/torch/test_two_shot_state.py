"""The owners' state: second residuals, owner steps, checkpoints, and other numbers of ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import Codec, OneBit
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (700,)}


def _start(codec: Codec | str = "onebit", **options: Any) -> tuple[Probe, hvdc.Compressor, Any]:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(), codec, **{"exchange": "two_shot", "threshold": 0, **options}
    )
    where = {key: options[key] for key in ("process_set",) if key in options}
    return model, compressor, distributed(model, compressor, **where)


def _train(model: Probe, optimizer: Any, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    return model.state_dict()


@on_ranks(2)
def test_residuals_and_state_do_not_depend_on_the_loss_scale() -> None:
    """Scales are powers of two: the same numbers come out, bit for bit."""
    for options in ({}, {"owner_step": hvdc.AdaGrad()}):
        plain, _, unscaled = _start(**options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        model, compressor, optimizer = _start(grad_scaler=scaler, **options)
        for step in range(5):
            scale = 2.0 ** (step % 3)
            scaler.update(scale)
            mine = targets(SHAPES, hvd.rank(), step)
            got = exchange(model, optimizer, {name: scale * g for name, g in mine.items()})
            expected = exchange(plain, unscaled, mine)
            assert_same_bits({name: g / scale for name, g in got.items()}, expected)
        assert compressor.residual_norm() > 0


def _unsent(states: list[dict[str, Any]], name: str) -> torch.Tensor:
    """Returns the part of the gradients that all ranks have yet to add to the average."""
    count, size = math.prod(SHAPES[name]), len(states)
    total = torch.zeros(count, dtype=torch.float64)
    for state in states:
        saved = state["tensors"][name]
        if saved["residual"] is not None:
            total += saved["residual"].double() / size
        owned = saved["owned"]
        if owned is not None and owned["residual"] is not None:
            part = owned["residual"].double() * owned["weight"] / size
            total[owned["begin"] : owned["end"]] += part
    return total


@on_ranks(4, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_another_number_of_ranks_takes_over_everything_unsent() -> None:
    sets = {n: hvd.add_process_set(list(range(n))) for n in (1, 2, 3)}
    sets[4] = hvd.global_process_set
    for old, new, after in ((3, 2, "two_shot"), (2, 4, "two_shot"), (3, 2, "allgather")):
        model, compressor, optimizer = _start(owner_step=hvdc.AdaGrad(), process_set=sets[old])
        _train(model, optimizer, range(3))
        states = hvd.allgather_object(compressor.state_dict(), name="states")[:old]
        step = {"owner_step": hvdc.AdaGrad()} if after == "two_shot" else {}
        model, compressor, optimizer = _start(process_set=sets[new], exchange=after, **step)
        if hvd.rank() < new:
            with pytest.raises(ValueError, match=r"needs those of all: load_resized\(\)"):
                compressor.load_state_dict(states[0])
            compressor.load_resized(states[::-1])
        resized = hvd.allgather_object(compressor.state_dict(), name="resized")[:new]
        for name in SHAPES:
            expected, got = _unsent(states, name), _unsent(resized, name)
            assert torch.allclose(got, expected, atol=1e-6), (old, new, after, name)
            if after == "two_shot":
                squares = [_square_sums(s, name) for s in (states, resized)]
                assert torch.equal(*squares)
        _train(model, optimizer, range(3, 5))


def _square_sums(states: list[dict[str, Any]], name: str) -> torch.Tensor:
    whole = torch.full((math.prod(SHAPES[name]),), math.nan)
    for state in states:
        owned = state["tensors"][name]["owned"]
        if owned["begin"] < owned["end"]:
            whole[owned["begin"] : owned["end"]] = owned["state"]["square_sum"]
    return whole


@on_ranks(2)
def test_an_owner_steps_state_stays_with_its_parts() -> None:
    """If the state cannot stay with its parts, an error leaves everything unchanged."""
    model, compressor, optimizer = _start(owner_step=hvdc.AdaGrad())
    _train(model, optimizer, range(2))
    before = copy.deepcopy(compressor.state_dict())
    with pytest.raises(ValueError, match="rebind: expected a compressor without owner_step"):
        compressor.rebind()
    assert _same_state(compressor.state_dict(), before)
    model, columns, optimizer = _start(OneBit("column"), owner_step=hvdc.AdaGrad())
    nothing = copy.deepcopy(columns.state_dict())
    message = (
        r"a: expected the state of an owner_step for elements \[.* of the transposed gradient, got"
    )
    with pytest.raises(ValueError, match=message):
        columns.load_state_dict(before)
    assert _same_state(columns.state_dict(), nothing)
    states = hvd.allgather_object(before, name="states of parts")
    columns.load_resized(states)
    resized = hvd.allgather_object(columns.state_dict(), name="states of columns")
    got = torch.cat([one["tensors"]["a"]["owned"]["state"]["square_sum"] for one in resized])
    rows, row = SHAPES["a"]
    assert torch.equal(got.view(row, rows).t().reshape(-1), _square_sums(states, "a"))
    _train(model, optimizer, range(2, 3))
    columns.load_state_dict(columns.state_dict())


def _same_state(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    def listed(state: dict[str, Any]) -> str:
        return repr(
            {
                name: {key: _numbers(value) for key, value in saved.items()}
                for name, saved in state["tensors"].items()
            }
        )

    return listed(got) == listed(expected)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return value.numpy().tobytes() if torch.is_tensor(value) else value
