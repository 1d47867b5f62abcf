"""Parameters enter compressors of DDP, optimizers and DiLoCo in the same way; see also torch/test_names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvd_compress.ddp as ddp
import hvd_compress.distributed as hvdc
from hvd_compress.codecs import OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests.ranks import on_ranks

Make = Callable[..., Any]


def _adam(given: Any, **options: Any) -> OneBitAdam:
    compressor = hvdc.Compressor(OneBit(), threshold=0, warmup_steps=1, **options)
    given = given.named_parameters() if isinstance(given, nn.Module) else given
    return OneBitAdam(given, compressor, lr=0.1)


def _buffering(given: Any, **options: Any) -> DoubleBuffering:
    named = list(given.named_parameters() if isinstance(given, nn.Module) else given)
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    return DoubleBuffering(
        named, optimizer, hvdc.Compressor(OneBit(), threshold=0, **options), enabled=False
    )


def _of_ddp(given: Any, **options: Any) -> ddp.Compressor:
    return ddp.Compressor(given, OneBit(), threshold=0, **options)


def _diloco(given: Any, **options: Any) -> DiLoCo:
    return DiLoCo(given, hvdc.Compressor(OneBit(), threshold=0, **options), sync_every=1)


EVERY: list[Make] = [_adam, _buffering, _of_ddp, _diloco]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 5))


def _named(*models: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [pair for model in models for pair in model.named_parameters()]


@on_ranks(2, launcher="torchrun")
def test_two_networks_whose_parameters_have_equal_names() -> None:
    """None of them is left where it was: an error names the remedy, after which both are trained."""
    encoder, decoder = _net(), _net()
    for make in (_adam, _buffering, _of_ddp):
        with pytest.raises(ValueError, match=r"got twice: 0\.bias, 0\.weight, .*prefix='encoder'"):
            make(_named(encoder, decoder))
    groups = [{"params": list(one.named_parameters())} for one in (encoder, decoder)]
    with pytest.raises(ValueError, match=r"got twice: 0\.bias"):
        _adam(groups)
    adam = _adam(groups[:1])
    with pytest.raises(ValueError, match=r"got twice: 0\.bias"):
        adam.add_param_group(groups[1])
    adam.step()  # As before.
    assert len(adam.param_groups) == 1

    named = [*encoder.named_parameters("encoder"), *decoder.named_parameters("decoder")]
    for make in (_adam, _buffering):
        trained = make(named)
        before = {name: one.detach().clone() for name, one in named}
        for _ in range(3):
            for _, one in named:
                one.grad = torch.ones_like(one)
            trained.step()
        assert not any(torch.equal(one, before[name]) for name, one in named)


@on_ranks(2, launcher="torchrun")
def test_one_parameter_of_two_names() -> None:
    model = _net()
    model[2].weight = nn.Parameter(torch.zeros(10, 20))
    model[0].weight = model[2].weight
    named = list(model.named_parameters(remove_duplicate=False))
    for make in (_buffering, _of_ddp):
        with pytest.raises(ValueError, match=r"one parameter as 0\.weight and as 2\.weight"):
            make(named)


@on_ranks(2, launcher="torchrun")
def test_lazy_modules_are_an_error_on_every_rank() -> None:
    """Each rank would draw its own weights in the first forward pass."""
    for make in EVERY:
        model = nn.Sequential(nn.Linear(20, 10), nn.LazyLinear(5))
        with pytest.raises(ValueError, match=r"1\.weight: expected an initialized parameter, got"):
            make(model)
        if dist.get_rank() == 0:
            model(torch.zeros(1, 20))
        if make is _of_ddp:
            continue  # Its ranks meet later.
        error = ValueError if dist.get_rank() else hvdc.ExchangeError
        with pytest.raises(error, match=r"1\.weight: expected an initialized parameter, got"):
            make(model)


@on_ranks(2, launcher="torchrun")
def test_patterns_match_the_names_of_compiled_models() -> None:
    for make in EVERY:
        model = torch.compile(_net())
        made = make(model, exclude=["*.bias"], layers={"2.*": None})
        if make is not _of_ddp:  # Others learn their tensors in the first exchange.
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            made.step()
        routes = (made if make is _of_ddp else made.compressor).routes()
        assert {name for name, one in routes.items() if not one.uncompressed} == {"0.weight"}


@on_ranks(2, launcher="torchrun")
def test_patterns_that_match_nothing_are_an_error_on_every_rank() -> None:
    wrong = dist.get_rank() == 1
    for make in EVERY:
        for options in ({"exclude": ["*.bais"]}, {"layers": {"*.bais": None}}):
            if make is _of_ddp and not wrong:
                continue
            error = ValueError if wrong else hvdc.ExchangeError
            with pytest.raises(
                error, match=r"pattern that matches a parameter's name, got '\*\.bais'"
            ):
                make(_net(), **(options if wrong else {}))
