"""FSDP2's own hybrid sharding and the compressor, side by side in the same script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import hvd_compress.fsdp as hvdc
from hvd_compress import OneBit
from hvd_compress.codecs import Int8
from tests.fsdp.probes import mesh_of, of_today
from tests.ranks import on_ranks
from tests.torch_models import DEVICE

Script = Callable[[Any, torch.Generator], Iterator[None]]
"""Trains a model; yields after each backward pass whose gradients are compared."""


class Block(nn.Module):
    """Two branches, of which the second one may be left out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        return y + self.second(x).tanh() if self.both else y


class Blocks(nn.Module):
    """Blocks, one after the other, and parameters of the root's own."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(3))
        self.begin, self.end = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.order = [0, 1, 2]
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for number in self.order:
            if self.reentrant is None:
                x = self.layers[number](x)
            else:
                x = checkpoint(self.layers[number], x, use_reentrant=self.reentrant)
        return self.end(x)


def _sharded(mesh: Any, model: Any, **options: Any) -> Any:
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """This rank's shards, None where there is no gradient."""
    model.reshard()  # Where an evaluation has left the root unsharded.
    named = [(name, one.grad) for name, one in model.named_parameters()]
    return {name: None if one is None else one.to_local().clone() for name, one in named}


def _run(model: Any, script: Script) -> list[dict[str, torch.Tensor | None]]:
    """Returns the gradients after each backward pass, and the parameters at the end."""
    generator = torch.Generator(DEVICE).manual_seed(100 + dist.get_rank())
    got = [_gradients(model) for _ in script(model, generator)]
    model.reshard()
    return [*got, {name: one.to_local().detach() for name, one in model.named_parameters()}]


def _compare(
    script: Script,
    make: Callable[[], Any] = Blocks,
    *,
    tolerance: float = 1e-6,
    codecs: bool = True,
    **options: Any,
) -> hvdc.Compressor:
    """Runs a script with and without a compressor; gradients must agree, and codecs must come close."""
    mesh = mesh_of(2)

    def sharded(own: Any) -> Any:
        torch.manual_seed(3)
        return _sharded(own, make(), **options)

    expected = _run(sharded(mesh), script)
    compressors = []
    for codec, error in (("none", tolerance), *((("int8", 0.03),) if codecs else ())):
        model = sharded(mesh["shard"])
        made = hvdc.Compressor(model, codec, mesh=mesh, threshold=1)
        compressors.append(made)
        for number, (want, got) in enumerate(zip(expected, _run(model, script), strict=True)):
            assert want.keys() == got.keys()
            for name, one in want.items():
                what = f"{codec}, {number}, {name}"
                other = got[name]
                assert (one is None) == (other is None), what
                if one is not None and other is not None and one.numel():
                    limit = error * max(1e-3, float(one.abs().max()))
                    torch.testing.assert_close(
                        other, one, rtol=0, atol=limit, msg=lambda text, w=what: f"{w}: {text}"
                    )
    dist.barrier()
    return compressors[-1]


def _batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(5, 24, generator=generator)


def _backward(model: Any, generator: torch.Generator) -> None:
    model(_batch(generator)).square().sum().backward()


@on_ranks(4, launcher="torchrun")
def test_parameters_that_no_rank_uses() -> None:
    """Whole modules, and a part of one: without a gradient, Adam does not move them."""

    def script(model: Any, generator: torch.Generator) -> Iterator[None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(4):
            model.order = [0, 1, 2] if step < 2 else [0, 2]
            model.layers[2].both = step != 3
            optimizer.zero_grad()
            _backward(model, generator)
            yield
            optimizer.step()

    _compare(script, codecs=False, tolerance=1e-5)


def _moved(model: Any, optimizer: Any, generator: torch.Generator) -> torch.Tensor:
    """A step; the weight that it leaves in one of the layers."""
    optimizer.zero_grad()
    _backward(model, generator)
    optimizer.step()
    return model.layers[1].second.weight.to_local().detach().clone()


@on_ranks(4, launcher="torchrun")
def test_residuals_stay_with_what_does_not_take_part() -> None:
    """Residuals of unused or frozen parameters are kept, and change no parameter."""
    mesh = mesh_of(2)
    for freezes in (False, True):
        torch.manual_seed(3)
        model = _sharded(mesh["shard"], Blocks())
        compressor = hvdc.Compressor(model, OneBit(), mesh=mesh, threshold=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        name = "layers.1.second.weight"

        step = functools.partial(_moved, model, optimizer, generator)
        before = step()
        residual = compressor.state_dict()["tensors"][name]["residual"].clone()
        assert residual.any()
        model.layers[1].both = freezes
        model.layers[1].second.requires_grad_(not freezes)
        after = step()
        assert torch.equal(before, after)
        assert model.layers[1].second.weight.grad is None
        assert torch.equal(residual, compressor.state_dict()["tensors"][name]["residual"])
        model.layers[1].both = True
        model.layers[1].second.requires_grad_(True)
        assert not torch.equal(after, step())


@of_today
@on_ranks(4, launcher="torchrun")
def test_replicas_that_use_different_parameters() -> None:
    """An error of every rank, unless FSDP2 is asked for zeros."""
    mesh = mesh_of(2)
    for codec in ("none", "int8"):
        for zeros in (False, True):
            torch.manual_seed(3)
            model = _sharded(mesh["shard"], Blocks())
            model.set_reduce_scatter_unused_params(zeros)
            hvdc.Compressor(model, codec, mesh=mesh, threshold=1)
            model.layers[1].both = mesh.get_local_rank("replicate") == 0
            generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
            if zeros:
                _backward(model, generator)
                continue
            with pytest.raises(hvdc.ExchangeError, match="expected all replicas to use the same"):
                _backward(model, generator)
            dist.barrier()


@on_ranks(4, launcher="torchrun")
def test_a_divisor_of_the_users_own() -> None:
    for factor in (None, 1.0, 2.0, 4.0, 8.0):

        def script(
            model: Any, generator: torch.Generator, factor: float | None = factor
        ) -> Iterator[None]:
            for module in (*model.layers, model):
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply.
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            _backward(model, generator)
            yield

        _compare(script)
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        _compare(script, mp_policy=policy, tolerance=2e-3)


@of_today
@on_ranks(4, launcher="torchrun")
def test_modules_that_run_more_than_once() -> None:
    """A module runs repeatedly in one forward pass, or in two before one backward pass."""

    def twice(model: Any, generator: torch.Generator) -> Iterator[None]:
        model.order = [0, 1, 1, 2, 0]
        for _ in range(2):
            _backward(model, generator)
            yield

    def pairs(model: Any, generator: torch.Generator) -> Iterator[None]:
        for _ in range(2):
            model.zero_grad()
            chosen, other = model(_batch(generator)), model(_batch(generator))
            (chosen.square().sum() - other.sum()).backward()
            yield

    def chunks(model: Any, generator: torch.Generator) -> Iterator[None]:
        """Also computes gradients of the module's inputs, which FSDP2 reduces as they come."""
        x = _batch(generator).requires_grad_()
        first = model(x)
        (first.sum() + model(first).square().sum()).backward()
        yield

    def again(model: Any, generator: torch.Generator) -> Iterator[None]:
        """Reduced each time that it ran: first as zeros, because gradients come with the last time."""
        model.set_reduce_scatter_unused_params(True)
        yield from twice(model, generator)

    for script, reductions in ((twice, 1), (pairs, 1), (chunks, 1), (again, 2)):
        compressor = _compare(script)
        passes = compressor.counters.steps
        assert passes == (1 if script is chunks else 2)
        positions = {n: one["step"] for n, one in compressor.state_dict()["tensors"].items()}
        assert positions["layers.1.first.weight"] == passes * reductions
        assert positions["layers.2.first.weight"] == passes


@on_ranks(4, launcher="torchrun")
def test_accumulation() -> None:
    """Tries both kinds of accumulation, with unused parameters, in the dtype of the reduction."""
    for wait in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        for uses_all in (True, False):

            def script(
                model: Any, generator: torch.Generator, w: str = wait, every: bool = uses_all
            ) -> Iterator[None]:
                for layer in model.layers:
                    layer.both = every
                for _ in range(2):
                    model.zero_grad()
                    for last in (False, False, True):
                        getattr(model, w)(last)
                        model.set_reshard_after_backward(last)
                        _backward(model, generator)
                        if last or w == "set_requires_all_reduce":
                            yield

            _compare(script)
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            _compare(script, mp_policy=policy)


@on_ranks(4, launcher="torchrun")
def test_several_backward_passes() -> None:
    def script(model: Any, generator: torch.Generator) -> Iterator[None]:
        loss = model(_batch(generator)).square().sum()
        loss.backward(retain_graph=True)
        yield
        loss.backward()
        yield
        model.set_is_last_backward(False)
        _backward(model, generator)
        yield
        model.set_is_last_backward(True)
        _backward(model, generator)
        yield

    _compare(script)
    _compare(script, reshard_after_forward=False)


@on_ranks(4, launcher="torchrun")
def test_activation_checkpointing() -> None:
    """Reentrant too, where each checkpoint has a backward pass of its own within the whole one."""
    for reentrant in (False, True):

        def script(
            model: Any, generator: torch.Generator, reentrant: bool = reentrant
        ) -> Iterator[None]:
            model.reentrant = reentrant
            for _ in range(2):
                model.zero_grad()
                _backward(model, generator)
                yield

        _compare(script)


class Tied(Blocks):
    """The first layer's weight is the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.end.weight = self.begin.weight


@on_ranks(4, launcher="torchrun")
def test_tied_weights_and_mixed_precision() -> None:
    def script(model: Any, generator: torch.Generator) -> Iterator[None]:
        for _ in range(2):
            model.zero_grad()
            _backward(model, generator)
            yield

    _compare(script, Tied)
    for policy, tolerance in (
        (MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), 1e-6),
        (MixedPrecisionPolicy(torch.bfloat16), 0.02),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), 0.02),
    ):
        _compare(script, Tied, tolerance=tolerance, codecs=tolerance < 0.01, mp_policy=policy)


class Quantized(Blocks):
    """Blocks that also have frozen weights of dtypes that no codec encodes."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            for number, dtype in enumerate((torch.uint8, torch.int32, torch.float64)):
                values = torch.arange(300).to(dtype)
                name = f"frozen{number}"
                layer.register_parameter(name, nn.Parameter(values, requires_grad=False))


@of_today
@on_ranks(4, launcher="torchrun")
def test_frozen_parameters_of_any_dtype() -> None:
    def script(model: Any, generator: torch.Generator) -> Iterator[None]:
        _backward(model, generator)
        yield

    _compare(script, Quantized)
    net = Quantized()
    for module in (*net.layers, net):
        fully_shard(module)
    hvdc.CompressedReduceScatter(net, Int8())
    _backward(net, torch.Generator(DEVICE).manual_seed(1))


@on_ranks(2, launcher="torchrun")
def test_a_model_without_parameters() -> None:
    mesh = mesh_of(2)
    model = fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh["shard"])
    with pytest.raises(ValueError, match="expected a model with parameters, got one without"):
        hvdc.Compressor(model, OneBit(), mesh=mesh)


@on_ranks(2, launcher="torchrun")
def test_accumulation_that_hooks_or_layers_would_miss() -> None:
    """An error, where what waits for its exchange would be lost or hooks would see zeros."""
    mesh = mesh_of(2)
    for hooked in (True, False):
        model = _sharded(mesh["shard"], Blocks())
        hvdc.Compressor(model, OneBit(), mesh=mesh, threshold=1)
        generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        model.set_requires_all_reduce(False)
        if hooked:
            model.layers[2].first.weight.register_post_accumulate_grad_hook(lambda _: None)
            with pytest.raises(hvdc.ExchangeError, match=r"layers\.2\..*without hooks"):
                _backward(model, generator)
            continue
        _backward(model, generator)
        model.set_requires_all_reduce(True)
        model.layers[2].both = False
        with pytest.raises(hvdc.ExchangeError, match=r"layers\.2\.second\..*in the backward pass"):
            _backward(model, generator)
