"""Gradients that a script discards without ``drop_step()`` are noticed; those that it uses are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import ErrorFeedback, OneBit
from tests.ranks import on_ranks
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 30), "b": (30,)}


class _Script:
    """A model in whose steps nothing is thrown away, unless it says so."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        ddp = {"gradient_as_bucket_view": options.pop("gradient_as_bucket_view", False)}
        self.ddp = DistributedDataParallel(Probe(SHAPES), **ddp)
        self.optimizer = optimizer(self.ddp.parameters(), lr=options.pop("lr", 0.1))
        self.compressor = hvdc.Compressor(self.ddp, OneBit(), **{"threshold": 0, **options})
        self.ddp.register_comm_hook(self.compressor, hvdc.hook)

    def backward(self, factor: float = 1.0) -> Any:
        loss = factor * self.ddp(targets(SHAPES, dist.get_rank(), 0))
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


@on_ranks(2, launcher="torchrun")
def test_gradients_that_are_thrown_away() -> None:
    """Each compressor warns once, also while an optimizer of other parameters steps, as in a GAN."""
    other = torch.nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    for view in (False, True):
        script = _Script(gradient_as_bucket_view=view)
        script.step()
        script.backward()
        script.optimizer.zero_grad()
        torch.optim.SGD([other], lr=0.1).step()
        with pytest.warns(UserWarning, match=r"call compressor\.drop_step\(\)"):
            script.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            script.optimizer.zero_grad()
            script.backward()


def _fused(*parts: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*parts, fused=True, **options)


@on_ranks(2, launcher="torchrun")
def test_gradients_that_are_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "expected OneBit with SGD or momentum")
        for optimizer in (torch.optim.SGD, torch.optim.AdamW, _fused):
            for rate in (0.0, 0.1):
                script = _Script(optimizer, lr=rate)
                for _ in range(3):
                    script.step()
        for view in (False, True):
            script = _Script(gradient_as_bucket_view=view)
            for _ in range(3):  # Piled up, with an exchange of each, and with one of all.
                script.optimizer.zero_grad()
                for _ in range(3):
                    script.backward()
                with script.ddp.no_sync():
                    script.backward()
                script.backward()
                script.optimizer.step()
        script = _Script()
        for _ in range(3):  # By hand.
            script.ddp.zero_grad()
            script.backward()
            for parameter in script.ddp.parameters():
                parameter.data -= 0.1 * parameter.grad


@on_ranks(2, launcher="torchrun")
def test_a_closure_that_is_called_several_times() -> None:
    script = _Script(torch.optim.LBFGS)

    def closure() -> Any:
        script.optimizer.zero_grad()
        return script.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            script.optimizer.step(closure)
    assert script.compressor.counters.steps > 4


@on_ranks(2, launcher="torchrun")
def test_gradients_that_residuals_do_not_count() -> None:
    """No warning follows an Inf, the warm-up, a codec without error feedback, or ``drop_step()``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"warmup_steps": 9}, {"feedback": ErrorFeedback(0.0)}):
            script = _Script(**options)
            for _ in range(3):
                script.step()
                script.optimizer.zero_grad()
                script.backward(1.0 if options else torch.inf)
        script = _Script()
        for _ in range(3):
            script.optimizer.zero_grad()
            script.backward()
            script.compressor.drop_step()
