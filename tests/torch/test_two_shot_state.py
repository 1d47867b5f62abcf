"""The owners' state: second residuals, owner steps, checkpoints, and other numbers of ranks."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import BF16, ECQ, Codec, ErrorFeedback, Int8, NoCompression, OneBit
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import Probe, Simulation, assert_same_bits, on_arrays, targets

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


@on_ranks(3)
def test_adagrad_between_the_shots() -> None:
    for codec in (OneBit(), Int8("linear")):
        model = Probe(SHAPES)
        compressor = hvdc.Compressor(
            model.named_parameters(),
            Route(codec, ErrorFeedback()),
            exchange="two_shot",
            owner_step=hvdc.AdaGrad(initial=0.25),
            threshold=0,
        )
        optimizer = distributed(model, compressor)
        simulation = Simulation(
            "two_shot",
            codec,
            ErrorFeedback(),
            SHAPES,
            hvd.size(),
            owner_step=on_arrays(hvdc.AdaGrad(initial=0.25)),
        )
        for step in range(4):
            gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
            got = exchange(model, optimizer, gradients[hvd.rank()])
            assert_same_bits(got, simulation.average(gradients))
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_adagrad_is_that_of_torch_where_nothing_is_lost() -> None:
    model, plain = Probe(SHAPES), Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(),
        Route(NoCompression(), ErrorFeedback()),
        exchange="two_shot",
        owner_step=hvdc.AdaGrad(),
        threshold=0,
    )
    ours = distributed(model, compressor, learning_rate=0.1)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for step in range(5):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        exchange(model, ours, gradients[hvd.rank()])
        for name, parameter in plain.named_parameters():
            parameter.grad = sum(g[name] for g in gradients) / hvd.size()
        theirs.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


@on_ranks(3)
def test_a_resumed_run_continues_bit_for_bit() -> None:
    rows: list[tuple[Codec | str, dict[str, Any]]] = [
        ("onebit", {}),
        ("ternary", {}),
        (ECQ(norm="l2"), {}),
        ("onebit", {"owner_step": hvdc.AdaGrad()}),
    ]
    for name, options in rows:
        model, _, optimizer = _start(name, **options)
        through = _train(model, optimizer, range(6))

        model, compressor, optimizer = _start(name, **options)
        _train(model, optimizer, range(3))
        saved = io.BytesIO()
        torch.save((model.state_dict(), compressor.state_dict()), saved)
        saved.seek(0)

        model, compressor, optimizer = _start(name, **options)
        parameters, state = torch.load(saved)
        model.load_state_dict(parameters)
        compressor.load_state_dict(state)
        assert_same_bits(_train(model, optimizer, range(3, 6)), through)


def _state(compressor: hvdc.Compressor) -> dict[str, Any]:
    return copy.deepcopy(compressor.state_dict()["tensors"])


def _assert_close(
    before: dict[str, Any], after: dict[str, Any], tolerance: float, beside: int
) -> None:
    """Residuals come back up to the rounding of what was added, so that one huge element is left out."""
    before, after = copy.deepcopy(before), copy.deepcopy(after)
    for state in (before, after):
        assert torch.isfinite(state["a"]["residual"][beside])
        state["a"]["residual"][beside] = 0
    for name in SHAPES:
        pairs = [
            (before[name]["residual"], after[name]["residual"]),
            (before[name]["owned"]["residual"], after[name]["owned"]["residual"]),
        ]
        for old, new in pairs:
            assert torch.isfinite(new).all()
            assert torch.allclose(old, new, atol=tolerance), (name, (old - new).abs().max())
        old, new = (s[name]["owned"]["state"] for s in (before, after))
        assert old.keys() == new.keys()
        assert_same_bits(new, old)


def _dropped(codec: Codec, feedback: ErrorFeedback, bad: dict[str, Any], tolerance: float) -> None:
    """A step in which ``bad`` is one element of ``a`` on some ranks leaves no trace on any."""
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(),
        Route(codec, feedback),
        exchange="two_shot",
        owner_step=hvdc.AdaGrad(initial=1.0),
        threshold=0,
    )
    optimizer = distributed(model, compressor)
    for step in range(2):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    before = _state(compressor)
    gradients = targets(SHAPES, hvd.rank(), 2)
    if hvd.rank() in bad["ranks"]:
        gradients["a"].view(-1)[bad["element"]] = bad["value"]
    optimizer.zero_grad()
    model(gradients).backward()
    optimizer.synchronize()
    assert not torch.isfinite(model.a.grad.view(-1)[bad["element"]])
    _assert_close(before, _state(compressor), tolerance, beside=bad["element"])
    with optimizer.skip_synchronize():
        optimizer.zero_grad()
    got = exchange(model, optimizer, targets(SHAPES, hvd.rank(), 3))
    assert all(torch.isfinite(g).all() for g in got.values())


@on_ranks(3)
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for codec, feedback in (
        (OneBit(), ErrorFeedback()),
        (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
        (ECQ(), ErrorFeedback(0.01, 1.0)),
    ):
        for value in (math.inf, math.nan):
            bad = {"ranks": {1}, "element": 5000, "value": value}
            _dropped(codec, feedback, bad, tolerance=1e-5)


@on_ranks(2)
def test_an_average_that_overflows_although_no_gradient_did() -> None:
    bad = {"ranks": {0, 1}, "element": 5000, "value": 3e38}
    _dropped(BF16(), ErrorFeedback(), bad, tolerance=1e-6)


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
def test_states_that_do_not_belong_together_are_refused() -> None:
    model, compressor, optimizer = _start()
    _train(model, optimizer, range(1))
    states = hvd.allgather_object(compressor.state_dict(), name="all states")
    before = copy.deepcopy(compressor.state_dict())
    later = copy.deepcopy(states)
    later[1]["tensors"]["a"]["step"] = 7
    other = copy.deepcopy(states)
    del other[0]["tensors"]["b"]
    seed = [{**state, "seed": 3} for state in states]
    broken = copy.deepcopy(states[hvd.rank()])
    broken["tensors"]["a"]["owned"]["residual"] = torch.zeros(3)
    for message, wrong in (
        ("one state of each rank, got those of ranks \\[0\\]", states[:1]),
        ("one state of each rank, got those of ranks \\[0, 0\\]", states[:1] * 2),
        ("a: expected states of one step, got step \\[1, 7\\]", later),
        ("expected this model's parameters, got none for \\['b'\\]", other),
        ("expected seed 0, got 3", seed),
    ):
        with pytest.raises(ValueError, match=message):
            compressor.load_resized(wrong)
    with pytest.raises(ValueError, match=r"a's part: expected a residual of .* elements, got 3"):
        compressor.load_state_dict(broken)
    for name in SHAPES:
        after = compressor.state_dict()["tensors"][name]
        assert torch.equal(after["residual"], before["tensors"][name]["residual"])


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


@on_ranks(2)
def test_a_state_of_another_exchange_is_sent_on() -> None:
    """Owned residuals that an allgather cannot carry on are added to the next gradient."""
    model, compressor, optimizer = _start()
    _train(model, optimizer, range(2))
    states = hvd.allgather_object(compressor.state_dict(), name="states of two shots")
    unsent = {name: _unsent(states, name) for name in SHAPES}
    model = Probe(SHAPES)
    other = hvdc.NoCompression(model.named_parameters(), threshold=0, name="other")
    other.load_state_dict(compressor.state_dict())
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    got = exchange(model, distributed(model, other), nothing)
    for name in SHAPES:
        assert torch.allclose(got[name].view(-1).double(), unsent[name], atol=1e-6), name
    assert other.residual_norm() == 0
