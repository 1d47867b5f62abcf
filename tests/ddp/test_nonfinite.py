"""Inf and NaN: visible on every rank, and as if the step had never been sent."""

from __future__ import annotations

import math
import warnings
from unittest import mock

import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, assert_same_bits, targets

SHAPES = {"a": (40, 70), "b": (3000,), "c": (2000,)}


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    return {
        name: part["residual"].clone()
        for name, part in tensors.items()
        if part["residual"] is not None
    }


def _a_bad_step(bad: float, where: str, compressor: hvdc.Compressor, ddp: object) -> None:
    rank = dist.get_rank()
    for step in range(2):
        exchange(ddp, targets(SHAPES, rank, step))
    before = _residuals(compressor)
    gradients = targets(SHAPES, rank, 2)
    if rank == 1:
        gradients[where].view(-1)[17] = bad
    got = exchange(ddp, gradients)
    assert not torch.isfinite(got[where].view(-1)[17])
    after = _residuals(compressor)
    assert after.keys() == before.keys()
    for name in before:
        largest = before[name].abs().max() + gradients[name].nan_to_num(0, 0, 0).abs().max()
        assert torch.isfinite(after[name]).all()
        assert (after[name] - before[name]).abs().max() <= 1e-6 * largest, (bad, where, name)
    got = exchange(ddp, targets(SHAPES, rank, 3))
    assert all(torch.isfinite(g).all() for g in got.values())
    assert_equal_on_all_ranks(got)


@on_ranks(2, launcher="torchrun")
def test_a_nonfinite_gradient_without_a_residual_drops_the_others_step() -> None:
    for where in ("a", "c"):
        ddp, compressor = distributed(
            Probe(SHAPES),
            OneBit(),
            ErrorFeedback(),
            layers={where: Int8()},
            bucket_cap_mb=0.001,
        )
        _a_bad_step(math.inf, where, compressor, ddp)
        assert where not in _residuals(compressor)


@on_ranks(2, launcher="torchrun")
def test_an_uncompressed_gradient_drops_the_others_step() -> None:
    """Loss scalers skip the step because of it."""
    for where in ("a", "c"):
        ddp, compressor = distributed(
            Probe(SHAPES), OneBit(), ErrorFeedback(), exclude=[where], bucket_cap_mb=0.001
        )
        _a_bad_step(math.inf, where, compressor, ddp)
        assert where not in _residuals(compressor)


@on_ranks(2, launcher="torchrun")
def test_an_unused_parameter_in_a_dropped_step() -> None:
    ddp, compressor = distributed(
        Probe(SHAPES), OneBit(), ErrorFeedback(), find_unused_parameters=True
    )
    rank = dist.get_rank()
    exchange(ddp, targets(SHAPES, rank, 0))
    before = _residuals(compressor)
    gradients = targets(SHAPES, rank, 1)
    gradients["a"][0, 0] = math.nan
    exchange(ddp, gradients, ["a", "b"] if rank == 0 else ["a", "c"])
    unused = "c" if rank == 0 else "b"
    assert_same_bits({unused: _residuals(compressor)[unused]}, {unused: before[unused]})


@on_ranks(2, launcher="torchrun")
def test_gradient_scaler_skips_the_step_everywhere() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.ReLU(), torch.nn.Linear(80, 40))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
    ddp, _ = distributed(model, OneBit(), ErrorFeedback(), threshold=100, grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    scales, losses = [], []
    for step in range(12):
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = ((ddp(x).float() - x) ** 2).mean()
        if step == 5 and dist.get_rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 5)
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert scales[5] < scales[4] and max(scales) > scales[0]
    assert losses[-1] < losses[0]


@on_ranks(2, launcher="torchrun")
def test_a_gradient_scaler_that_the_compressor_does_not_know() -> None:
    """Ranks are warned at the first step, unless the scaler is disabled or there are no residuals."""
    known = torch.amp.GradScaler(DEVICE.type)
    for scaler, feedback, options, warned in (
        (torch.amp.GradScaler(DEVICE.type), ErrorFeedback(), {}, 1),
        (torch.amp.GradScaler(DEVICE.type), ErrorFeedback(0.0), {}, 0),
        (
            torch.amp.GradScaler(DEVICE.type),
            ErrorFeedback(0.0),
            {"layers": {"weight": OneBit()}},
            1,
        ),
        (torch.amp.GradScaler(DEVICE.type, enabled=False), ErrorFeedback(), {}, 0),
        (known, ErrorFeedback(), {"grad_scaler": known}, 0),
    ):
        ddp, _ = distributed(torch.nn.Linear(40, 40), OneBit(), feedback, threshold=100, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        other = torch.nn.Linear(2, 2)  # Another scaler's steps are no reason.
        with warnings.catch_warnings(record=True) as told:
            for _ in range(2):
                apart, its = torch.amp.GradScaler(DEVICE.type), torch.optim.SGD(other.parameters())
                apart.scale(other(torch.ones(2)).sum()).backward()
                apart.step(its)
                scaler.scale(ddp(torch.ones(40)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert (
            sum("make the compressor with grad_scaler=" in str(one.message) for one in told)
            == warned
        )


@on_ranks(2, launcher="torchrun")
def test_the_loss_scale_is_read_once_a_step() -> None:
    """On a GPU, each read of the loss scale waits for all work before it."""
    shapes = {"a": (4096,), "b": (3000,), "c": (70, 3)}
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    with mock.patch.object(scaler, "get_scale", wraps=scaler.get_scale) as reads:
        ddp, _ = distributed(Probe(shapes), OneBit(), ErrorFeedback(), grad_scaler=scaler)
        for step in range(3):
            exchange(ddp, targets(shapes, dist.get_rank(), step))
            assert reads.call_count == step + 1


@on_ranks(2, launcher="torchrun")
def test_residuals_follow_the_loss_scale() -> None:
    """Mass is conserved in unscaled units although the scale changes, also in a step that is dropped."""
    shapes = {"a": (4096,)}
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    ddp, compressor = distributed(Probe(shapes), OneBit(), ErrorFeedback(), grad_scaler=scaler)
    total, sent = torch.zeros(4096), torch.zeros(4096)
    for step in range(6):
        scale = 2.0 ** (step % 3)
        scaler.update(scale) if step else scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        every = [targets(shapes, r, step) for r in range(2)]
        sent += exchange(ddp, {"a": scale * every[dist.get_rank()]["a"]})["a"] / scale
        total += sum(g["a"] for g in every) / 2
        if step == 3:
            kept = compressor.state_dict()["tensors"]["a"]["residual"] / scale
            scaler.update(32.0)
            exchange(ddp, targets(shapes, dist.get_rank(), 9))
            compressor.drop_step()
            saved = compressor.state_dict()["tensors"]["a"]
            assert torch.equal(saved["residual"] / saved["residual_scale"], kept)
    residual = compressor.state_dict()["tensors"]["a"]["residual"] / scaler.get_scale()
    assert math.isclose(compressor.residual_norm(), residual.double().norm().item(), rel_tol=1e-6)
    dist.all_reduce(residual)
    assert torch.allclose(sent + residual / 2, total, atol=1e-5)
