"""Inf and NaN: visible on every rank, and as if the step had never been sent."""

from __future__ import annotations

import math

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed


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
