"""Adam with a compressed momentum, beside the same in one process."""

from __future__ import annotations

import copy
import io
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.optim import OneBitAdam
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, Probe, Simulation, assert_same_bits, targets

SHAPES = {"first": (70, 40), "second": (3000,), "third": (1500,)}
WARM = 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _compressor(codec: Any = None, **options: Any) -> hvdc.Compressor:
    codec = codec or OneBit()
    options = {"threshold": 0, "warmup_steps": WARM, **options}
    return hvdc.Compressor(codec, **options)


def _model() -> Probe:
    """Other parameters on every rank; those of the first one count."""
    model = Probe(SHAPES)
    values = targets(SHAPES, dist.get_rank(), 1000)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def _gradients(model: torch.nn.Module, step: int, rank: int | None = None) -> None:
    values = targets(SHAPES, dist.get_rank() if rank is None else rank, step, 1.0 + step)
    for name, parameter in model.named_parameters():
        parameter.grad = values[name]


def _made(codec: Any = None) -> tuple[Probe, OneBitAdam]:
    model = _model()
    return model, OneBitAdam(model.named_parameters(), _compressor(codec), **OPTIONS)


def _go_on(model: torch.nn.Module, optimizer: OneBitAdam, steps: range) -> None:
    for step in steps:
        _gradients(model, step)
        optimizer.step()


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _assert_alike(model: torch.nn.Module) -> None:
    """The same bits on every rank."""
    for parameter in model.parameters():
        rows = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, parameter.detach())
        for row in rows:
            assert torch.equal(row, rows[0])


def _constant(warmup_steps: Any, betas: tuple[float, float] = (0.9, 0.5)) -> OneBitAdam:
    codec = Route(OneBit())
    return OneBitAdam(
        _model().named_parameters(), codec, warmup_steps=warmup_steps, betas=betas, lr=0.1
    )


def _train(optimizer: OneBitAdam, steps: range, growth: float = 1.0) -> list[torch.Tensor]:
    """Steps with gradients of each rank's own, times a growing factor; the parameters afterwards."""
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        own = targets(SHAPES, dist.get_rank(), 0).values()
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient * growth**step
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@on_ranks(2, launcher="torchrun")
def test_a_warm_up_ends_when_the_variance_is_stable() -> None:
    """After n steps with a constant gradient, the variance is 1 - 0.5**n of its square.

    It is looked at in every second step: the ratio is 0.95 in the sixth, and 0.99 in the eighth.
    """
    automatic = _constant("auto")
    _train(automatic, range(7))
    states = automatic.state.values()
    assert {state["calls"] for state in states} == {7}
    saved = copy.deepcopy((automatic.state_dict(), automatic.compressor.state_dict()))
    got = _train(automatic, range(7, 12))
    assert {state["variance_step"] for state in states} == {8}
    expected = _train(_constant(8), range(12))
    again = _constant("auto")
    for parameter, value in zip(
        again.param_groups[0]["params"], _train(_constant(99), range(7)), strict=True
    ):
        parameter.detach().copy_(value)
    again.load_state_dict(saved[0])
    again.compressor.load_state_dict(saved[1])
    resumed = _train(again, range(7, 12))
    for one, other, third in zip(got, expected, resumed, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
        rows = [torch.empty_like(one) for _ in range(2)]
        dist.all_gather(rows, one)
        assert torch.equal(*rows)


@on_ranks(2, launcher="torchrun")
def test_a_warm_up_goes_on_while_the_variance_grows_up_to_the_compressors_own() -> None:
    growing = _constant("auto")
    _train(growing, range(12), growth=1.1)
    assert {state["variance_step"] for state in growing.state.values()} == {12}
    limited = OneBitAdam(
        _model().named_parameters(),
        hvdc.Compressor(OneBit(), warmup_steps=5),
        warmup_steps="auto",
        betas=(0.9, 0.5),
    )
    _train(limited, range(7), growth=1.1)
    assert {state["variance_step"] for state in limited.state.values()} == {5}


@on_ranks(2, launcher="torchrun")
def test_the_warm_up_is_adamw_with_averaged_gradients() -> None:
    model, optimizer = _made()
    stock = Probe(SHAPES)
    stock.load_state_dict(model.state_dict())
    adamw = torch.optim.AdamW(stock.parameters(), **OPTIONS)
    for step in range(WARM):
        _gradients(model, step)
        optimizer.step()
        everybodys = [targets(SHAPES, rank, step, 1.0 + step) for rank in range(2)]
        for name, parameter in stock.named_parameters():
            parameter.grad = (everybodys[0][name] + everybodys[1][name]) / 2
        adamw.step()
    for got, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_then_the_average_of_the_encoded_momenta_is_the_momentum() -> None:
    """Algorithm 1 of the paper, written once more."""
    for codec, exchange in ((OneBit(), "allgather"), (Int8(), "two_shot")):
        model = _model()
        compressor = _compressor(codec, exchange=exchange)
        optimizer = OneBitAdam(model.named_parameters(), compressor, **OPTIONS)
        _go_on(model, optimizer, range(WARM))
        feedback = codec.feedback
        simulation = Simulation(exchange, codec, feedback, SHAPES, 2)
        states = {name: optimizer.state[p] for name, p in model.named_parameters()}
        momentum = {name: state["exp_avg"].clone() for name, state in states.items()}
        variance = {name: state["exp_avg_sq"].clone() for name, state in states.items()}
        for step in range(WARM, WARM + 5):
            before = _parameters(model)
            _gradients(model, step)
            optimizer.step()
            sent = [
                {
                    name: momentum[name] * 0.9 + (1 - 0.9) * gradient
                    for name, gradient in targets(SHAPES, rank, step, 1.0 + step).items()
                }
                for rank in range(2)
            ]
            momentum = simulation.average(sent)
            for name, parameter in model.named_parameters():
                state = states[name]
                assert torch.equal(state["exp_avg_sq"], variance[name])
                torch.testing.assert_close(state["exp_avg"], momentum[name], rtol=1e-5, atol=1e-6)
                mean = state["exp_avg"] / (1 - 0.9 ** (step + 1))
                root = (variance[name] / (1 - 0.95**WARM)).sqrt()
                expected = before[name] * (1 - 0.1 * 0.1) - 0.1 * mean / (root + 1e-8)
                torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)
            momentum = {name: state["exp_avg"].clone() for name, state in states.items()}
        _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_states_of_different_steps_are_an_error_on_every_rank() -> None:
    """Otherwise gradients would be encoded in the warm-up, or momenta not encoded after it."""
    for steps, codec in ((2, OneBit()), (WARM + 2, OneBit()), (WARM + 2, Int8())):
        model, optimizer = _made(codec)
        compressor = optimizer.compressor
        _go_on(model, optimizer, range(steps))
        saved = copy.deepcopy([m.state_dict() for m in (model, optimizer, compressor)])
        before = _parameters(model)
        _gradients(model, steps)
        optimizer.step()
        for left_out, got in ((1, (0, steps)), (2, (steps, 0))):
            for forget in ((0, 1), (1,)):
                again, other = _model(), _compressor(codec)
                resumed = OneBitAdam(again.named_parameters(), other, **OPTIONS)
                for number, made in enumerate((again, resumed, other)):
                    if number != left_out or dist.get_rank() not in forget:
                        made.load_state_dict(copy.deepcopy(saved[number]))
                message = f"first: expected .*got {got[0]} exchanges in .* and {got[1]} in the comp"
                _gradients(again, steps)
                error = ValueError if dist.get_rank() in forget else hvdc.ExchangeError
                with pytest.raises(error, match=message):
                    resumed.step()
                assert_same_bits(_parameters(again), before)
                if forget == (0, 1):  # Nothing was sent.
                    late: Any = (resumed, other)[left_out - 1]
                    late.load_state_dict(copy.deepcopy(saved[left_out]))
                    resumed.step()
                    assert_same_bits(_parameters(again), _parameters(model))


@on_ranks(2, launcher="torchrun")
def test_checkpoints_of_torch_distributed_checkpoint() -> None:
    """They find the optimizer's state without a step, which would send residuals away."""
    for codec in (OneBit(), Int8()):
        for saved_after in (0, 2, WARM + 2):
            model, optimizer = _made(codec)
            compressor = optimizer.compressor
            _go_on(model, optimizer, range(saved_after))
            optimizer.zero_grad()
            norm, sent = compressor.residual_norm(), compressor.counters.wire_bytes
            saved = copy.deepcopy(
                [get_optimizer_state_dict(model, optimizer), compressor.state_dict()]
            )
            assert (compressor.residual_norm(), compressor.counters.wire_bytes) == (norm, sent)
            again, resumed = _made(codec)
            other = resumed.compressor
            again.load_state_dict(model.state_dict())
            other.load_state_dict(saved[1])
            set_optimizer_state_dict(again, resumed, saved[0])
            assert other.counters.wire_bytes == 0 and other.residual_norm() == norm
            for one, made in ((model, optimizer), (again, resumed)):
                _go_on(one, made, range(saved_after, WARM + 5))
            assert_same_bits(_parameters(again), _parameters(model))


@on_ranks(2, launcher="torchrun")
def test_a_step_that_fails_is_counted_by_both() -> None:
    """The warm-up ends for the optimizer where it ends for the compressor."""
    model, optimizer = _made()
    for step in range(WARM + 2):
        _gradients(model, step)
        if step != 1:
            optimizer.step()
            continue
        for codec in (Int8(), OneBit()):
            if dist.get_rank() == 1:
                optimizer.compressor.set_codec(codec)
            if codec == Int8():
                with pytest.raises(hvdc.ExchangeError, match="first"):
                    optimizer.step()
    state = optimizer.state[model.first]
    assert (state["calls"], state["step"], state["variance_step"]) == (WARM + 2, WARM + 1, WARM - 1)
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_a_step_without_a_parameter_to_train() -> None:
    """As in AdamW, nothing happens; and ranks that freeze others learn of it."""
    model, optimizer = _made()
    model.requires_grad_(False)
    before = _parameters(model)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert_same_bits(_parameters(model), before)
    model.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(hvdc.ExchangeError, match="differ"):
        optimizer.step()


@on_ranks(2, launcher="torchrun")
def test_a_copy_goes_on_bit_for_bit() -> None:
    model, optimizer = _made()
    _go_on(model, optimizer, range(WARM + 2))
    optimizer.skipped_steps = 3
    twin, copied = copy.deepcopy((model, optimizer))
    assert copied.compressor is not optimizer.compressor and copied.skipped_steps == 3
    for one, beside in ((model, optimizer), (twin, copied)):
        _go_on(one, beside, range(WARM + 2, WARM + 5))
    assert_same_bits(_parameters(twin), _parameters(model))
    assert copied.compressor.residual_norm() == optimizer.compressor.residual_norm() > 0


@on_ranks(2, launcher="torchrun")
def test_no_rank_makes_a_step_with_an_inf() -> None:
    model, optimizer = _made()
    compressor = optimizer.compressor
    for step in range(8):
        _gradients(model, step)
        bad = step in (1, 5)  # In the warm-up, and after it.
        if bad and dist.get_rank() == 1:
            assert model.second.grad is not None
            model.second.grad[7] = float("inf")
        before = _parameters(model)
        kept, norm = copy.deepcopy(optimizer.state_dict()["state"]), compressor.residual_norm()
        optimizer.step()
        if bad:
            assert_same_bits(_parameters(model), before)
            for number, state in optimizer.state_dict()["state"].items():
                assert torch.equal(state["exp_avg"], kept[number]["exp_avg"])
                assert state["step"] == kept[number]["step"]
            assert compressor.residual_norm() == norm
        else:
            assert not torch.equal(model.second, before["second"])
    assert optimizer.skipped_steps == 2
    assert float(compressor.residual_norm()) > 0
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_a_warm_up_begins_with_the_first_step_that_is_made() -> None:
    trained = []
    for skipped in (0, 1, WARM + 1):
        model, optimizer = _made()
        for step in range(-skipped, WARM + 3):
            _gradients(model, max(step, 0))
            if step < 0 and dist.get_rank() == 1:
                assert model.second.grad is not None
                model.second.grad[7] = float("nan")
            optimizer.step()
        assert optimizer.skipped_steps == skipped
        trained.append(_parameters(model))
    for other in trained[1:]:
        assert_same_bits(other, trained[0])


@on_ranks(2, launcher="torchrun")
def test_an_inf_in_what_is_not_encoded_leaves_residuals_alone() -> None:
    model = _model()
    optimizer = OneBitAdam(model.named_parameters(), _compressor(exclude=["third"]), **OPTIONS)
    _go_on(model, optimizer, range(WARM + 2))
    before, norm = _parameters(model), optimizer.compressor.residual_norm()
    _gradients(model, WARM + 2)
    grad = dict(model.named_parameters())["third"].grad
    assert grad is not None
    grad[0] = torch.inf
    optimizer.step()
    assert_same_bits(_parameters(model), before)
    assert optimizer.skipped_steps == 1 and optimizer.compressor.residual_norm() == norm > 0


@on_ranks(2, launcher="torchrun")
def test_parameters_without_gradients_and_groups() -> None:
    """A rank that does not use a parameter has zeros to send; frozen ones stay as they are."""
    model = _model()
    model.third.requires_grad_(False)
    first = {"params": [("first", model.first)], "lr": 0.01}
    second = {"params": [("second", model.second), ("third", model.third)]}
    optimizer = OneBitAdam([first, second], _compressor(), **OPTIONS)
    before = _parameters(model)
    for step in range(WARM + 3):
        _gradients(model, step)
        if dist.get_rank() == 1:
            model.second.grad = None
        optimizer.step()
    _assert_alike(model)
    assert torch.equal(model.third, before["third"])
    assert not torch.equal(model.second, before["second"])
    moved = [(_parameters(model)[name] - before[name]).abs().mean() for name in ("first", "second")]
    assert moved[0] < moved[1] / 3


@on_ranks(2, launcher="torchrun")
def test_unnamed_parameters_and_half_precision() -> None:
    model = Probe(SHAPES, torch.bfloat16)
    optimizer = OneBitAdam(model.parameters(), _compressor(), **OPTIONS)
    for step in range(WARM + 3):
        values = targets(SHAPES, dist.get_rank(), step)
        for name, parameter in model.named_parameters():
            parameter.grad = values[name].bfloat16()
        optimizer.step()
    _assert_alike(model)
    assert all(parameter.abs().mean() > 0.1 for parameter in model.parameters())


@on_ranks(2, launcher="torchrun")
def test_a_closure() -> None:
    model, optimizer = _made()
    values = targets(SHAPES, dist.get_rank(), 0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(values)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(WARM + 5)]
    assert losses[-1] < losses[0]
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_what_is_wrong_is_said() -> None:
    model = _model()
    named = list(model.named_parameters())
    with pytest.raises(TypeError, match=r"OneBitAdam\(.*, Int8\(\), warmup_steps=1000\)"):
        OneBitAdam(named, 3)  # type: ignore[arg-type]
    for codec in (OneBit(), _compressor(warmup_steps=0)):
        with pytest.raises(ValueError, match='in, such as 1000 or "auto", got 0'):
            OneBitAdam(named, codec)
    with pytest.raises(ValueError, match="expected those of the compressor, got 5, too"):
        OneBitAdam(named, _compressor(), warmup_steps=5)
    with pytest.raises(ValueError, match="weight: expected a parameter with memory"):
        meta = torch.nn.Linear(9, 9, device="meta")
        OneBitAdam(meta.named_parameters(), _compressor())
    with pytest.raises(ValueError, match="lr"):
        OneBitAdam(named, _compressor(), lr=-1.0)
    with pytest.raises(ValueError, match="betas"):
        OneBitAdam(named, _compressor(), betas=(0.9, 1.0))
    with pytest.raises(hvdc.ExchangeError, match="lr"):
        OneBitAdam(named, _compressor(), lr=0.1 * (1 + dist.get_rank()))
    optimizer = OneBitAdam(named, _compressor())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(targets(SHAPES, 0, 0))).backward()
    with pytest.raises(TypeError, match="bfloat16"):
        scaler.step(optimizer)


def _beside_adamw(
    seen: Callable[[int], dict[str, Any]], steps: int, names: Sequence[str] = tuple(SHAPES)
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the changes by steps of 1-bit Adam and AdamW; ``seen`` names elements with gradients."""
    model, stock = Probe({n: SHAPES[n] for n in names}), Probe({n: SHAPES[n] for n in names})
    optimizer = OneBitAdam(model.named_parameters(), _compressor(), **OPTIONS)
    adamw = torch.optim.AdamW(stock.parameters(), **OPTIONS)
    for step in range(steps):
        everybodys = [targets(SHAPES, rank, step) for rank in range(2)]
        parts = seen(step)
        for name in names:
            mask = torch.zeros(SHAPES[name], dtype=torch.float32, device=DEVICE)
            if name in parts:
                mask[parts[name]] = 1.0
            # A mean that lasts, with noise.
            own = [mask * (1.0 + values[name]) for values in everybodys]
            used = name in parts
            model.get_parameter(name).grad = own[dist.get_rank()] if used else None
            stock.get_parameter(name).grad = (own[0] + own[1]) / 2 if used else None
        optimizer.step()
        adamw.step()
    _assert_alike(model)
    return {n: (model.get_parameter(n).detach(), stock.get_parameter(n).detach()) for n in names}


@on_ranks(2, launcher="torchrun")
def test_a_parameter_that_joins_late_has_a_warm_up_of_its_own() -> None:
    for joins in (WARM - 1, WARM, 2 * WARM):

        def seen(step: int, joins: int = joins) -> dict[str, Any]:
            return {"first": ...} if step < joins else {"first": ..., "third": ...}

        got, expected = _beside_adamw(seen, joins + WARM)["third"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        got, expected = _beside_adamw(seen, joins + 20)["third"]
        assert 0.5 < got.norm() / expected.norm() < 2, got.norm() / expected.norm()


@on_ranks(2, launcher="torchrun")
def test_elements_that_are_seen_late_move_as_far_as_with_adamw() -> None:
    """Rows of an embedding; and what has gradients of rounding errors only, as the bias of keys."""

    def seen(step: int) -> dict[str, Any]:
        return {"first": slice(0, 50 if step < 2 * WARM else 70), "second": slice(0, 2000)}

    with unittest.TestCase().assertLogs("hvd_compress.optim.onebit_adam", "WARNING") as logs:
        changes = _beside_adamw(seen, 2 * WARM + 15, ["first", "second"])
    assert len(logs.output) == 1 and "for some elements of first, second, or" in logs.output[0]
    got, expected = changes["first"]
    for rows in (slice(0, 50), slice(50, 70)):
        assert 0.3 < got[rows].norm() / expected[rows].norm() < 3
    got, expected = changes["second"]
    assert expected[2000:].norm() == 0
    assert got[2000:].abs().max() < 0.1 * expected[:2000].abs().max()


@on_ranks(2, launcher="torchrun")
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    """Also in the warm-up of a parameter that joins late."""

    def train(model: Probe, optimizer: OneBitAdam, steps: range) -> None:
        for step in steps:
            _gradients(model, step)
            if step < WARM + 2:
                model.get_parameter("third").grad = None
            optimizer.step()

    for saved_after in (2, WARM + 1, WARM + 4):
        model, optimizer = _made()
        train(model, optimizer, range(saved_after))
        file = io.BytesIO()
        torch.save([one.state_dict() for one in (model, optimizer, optimizer.compressor)], file)
        again, resumed = _made()
        saved = torch.load(io.BytesIO(file.getvalue()))
        for what, state in zip((again, resumed, resumed.compressor), saved, strict=True):
            what.load_state_dict(state)
        train(model, optimizer, range(saved_after, WARM + 12))
        train(again, resumed, range(saved_after, WARM + 12))
        assert_same_bits(_parameters(again), _parameters(model))
        calls = {name: resumed.state[p]["calls"] for name, p in again.named_parameters()}
        assert calls == {"first": WARM + 12, "second": WARM + 12, "third": 10}


@on_ranks(2, launcher="torchrun")
def test_frozen_codes_of_weights_and_what_is_unfrozen_later() -> None:
    model = _model()
    codes = torch.full((50,), 1 + dist.get_rank(), dtype=torch.uint8, device="cpu")
    model.register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))
    model.third.requires_grad_(False)
    optimizer = OneBitAdam(model.named_parameters(), _compressor(), **OPTIONS)
    before = _parameters(model)
    assert before["codes"].unique().tolist() == [1]
    for step in range(WARM + 6):
        model.third.requires_grad_(step > WARM)
        for name, value in targets(SHAPES, dist.get_rank(), step).items():
            parameter = model.get_parameter(name)
            parameter.grad = value if parameter.requires_grad else None
        optimizer.step()
        assert torch.equal(model.third, before["third"]) == (step <= WARM)
    _assert_alike(model)
    assert (model.third - before["third"]).abs().max() < 6 * 3 * OPTIONS["lr"]
