"""Inf and NaN: visible on every rank, and as if the step had never been sent."""

from __future__ import annotations

import math
from unittest import mock

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange
from tests.torch_models import Probe, targets


@on_ranks(2)
def test_gradient_scaler_skips_the_step_everywhere() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 80), torch.nn.ReLU(), torch.nn.Linear(80, 40))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=100, grad_scaler=scaler)
    optimizer = distributed(model, compressor, learning_rate=0.05)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    scales, losses = [], []
    for step in range(12):
        x = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ((model(x).float() - x) ** 2).mean()
        if step == 5 and hvd.rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 5)
        assert_identical_on_all_ranks(model)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert scales[5] < scales[4] and max(scales) > scales[0]
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_a_gradient_scaler_that_the_compressor_does_not_know() -> None:
    model = torch.nn.Linear(40, 40)
    compressor = hvdc.OneBit(model, threshold=0)
    optimizer, scaler = distributed(model, compressor), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(40)).sum()).backward()
    optimizer.synchronize()
    with (
        optimizer.skip_synchronize(),
        pytest.warns(UserWarning, match="make the compressor with grad_scaler=scaler"),
    ):
        scaler.step(optimizer)


@on_ranks(2)
def test_the_loss_scale_is_read_once_a_step() -> None:
    """On a GPU, each read of the loss scale waits for all work before it."""
    shapes = {"a": (4096,), "b": (3000,), "c": (70, 3)}
    model = Probe(shapes)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mock.patch.object(scaler, "get_scale", wraps=scaler.get_scale) as reads:
        compressor = hvdc.OneBit(model.named_parameters(), threshold=0, grad_scaler=scaler)
        optimizer = distributed(model, compressor)
        for step in range(3):
            exchange(model, optimizer, targets(shapes, hvd.rank(), step))
            assert reads.call_count == step + 1


@on_ranks(2)
def test_residuals_follow_the_loss_scale() -> None:
    """Mass is conserved in unscaled units although the scale changes between steps."""
    shapes = {"a": (4096,)}
    model = Probe(shapes)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0, grad_scaler=scaler)
    optimizer = distributed(model, compressor)
    total, sent = torch.zeros(4096), torch.zeros(4096)
    for step in range(6):
        scale = 2.0 ** (step % 3)
        scaler.update(scale) if step else scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        every = [targets(shapes, r, step) for r in range(hvd.size())]
        mine = {"a": scale * every[hvd.rank()]["a"]}
        sent += exchange(model, optimizer, mine)["a"] / scale
        total += sum(g["a"] for g in every) / hvd.size()
    residual = compressor.state_dict()["tensors"]["a"]["residual"] / scaler.get_scale()
    assert math.isclose(compressor.residual_norm(), residual.double().norm().item(), rel_tol=1e-6)
    everywhere = hvd.allreduce(residual, name="mean residual")
    assert torch.allclose(sent + everywhere, total, atol=1e-5)
