"""AdaGrad on a rank's own gradients, before anything takes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.papers.local_step import LocalStep
from hvd_compress.distributed import AdaGrad


def _backward(model: nn.Module, seed: int, *, bad: bool = False) -> list[torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    (model(x) * (float("inf") if bad else 1.0)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_are_those_that_torchs_adagrad_would_step_by() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    reference = [nn.Parameter(torch.zeros_like(p)) for p in plain.parameters()]
    optimizer = torch.optim.Adagrad(reference, lr=1.0, eps=1e-10)
    local = LocalStep(model.named_parameters(), AdaGrad())
    for seed in range(3):
        before = [parameter.detach().clone() for parameter in reference]
        for parameter, gradient in zip(reference, _backward(plain, seed), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for got, old, new in zip(_backward(model, seed), before, reference, strict=True):
            torch.testing.assert_close(got, old - new.detach())
    local.remove()
    for got, expected in zip(_backward(model, 9), _backward(plain, 9), strict=True):
        assert torch.equal(got, expected)


def test_a_state_goes_on_and_an_inf_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    local = LocalStep(model.named_parameters(), AdaGrad(decay=0.9, momentum=0.5))
    _backward(model, 0)
    other = copy.deepcopy(model)
    again = LocalStep(other.named_parameters(), AdaGrad(decay=0.9, momentum=0.5))
    again.load_state_dict(copy.deepcopy(local.state_dict()))
    assert not all(one.isfinite().all() for one in _backward(other, 1, bad=True))
    for got, expected in zip(_backward(other, 2), _backward(model, 2), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(TypeError, match=r"LocalStep\.step: expected a callable, got 3"):
        LocalStep(model.named_parameters(), 3)  # type: ignore[arg-type]
