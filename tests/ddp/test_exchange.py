"""Every codec through a stock DistributedDataParallel, against all ranks simulated by the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import (
    FP16,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    codec_class,
)
from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.collectives import Collectives
from tests.ddp.probes import (
    Probe,
    distributed,
    exchange,
    gradients_of,
)
from tests.ranks import on_ranks
from tests.stranger import installed
from tests.torch_models import DEVICE, Simulation, assert_same_bits, targets

SHAPES = {"a": (40, 70), "b": (3000,), "c": (8, 3, 5, 5)}
NONE = ErrorFeedback(alpha=0.0)


def _assert_residuals(compressor: hvdc.Compressor, simulation: Simulation) -> None:
    state = compressor.state_dict()
    residuals = {name: part["residual"] for name, part in state["tensors"].items()}
    expected = simulation.residuals[state["rank"]]
    assert_same_bits(residuals, {name: torch.from_numpy(h) for name, h in expected.items()})


def _same_as_stock(codec: Codec, stock_hook: Callable) -> None:
    ddp, _ = distributed(Probe(SHAPES), codec, NONE)
    plain = DistributedDataParallel(Probe(SHAPES), bucket_cap_mb=0.01)
    plain.register_comm_hook(None, stock_hook)
    for step in range(3):
        gradients = targets(SHAPES, dist.get_rank(), step)
        assert_same_bits(exchange(ddp, gradients), exchange(plain, gradients))


@on_ranks(3, launcher="torchrun")
def test_uncompressed_and_half_precision_are_pytorchs_own() -> None:
    _same_as_stock(NoCompression(), default_hooks.allreduce_hook)
    _same_as_stock(FP16(), default_hooks.fp16_compress_hook)


@on_ranks(2, launcher="torchrun")
def test_buckets_that_are_rebuilt_in_another_order() -> None:
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback())
    seen = []

    def watching(
        state: hvdc.Compressor, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        names = [n for p in bucket.parameters() for n, q in ddp.module.named_parameters() if p is q]
        seen.append(names)
        return hvdc.hook(state, bucket)

    watching.__annotations__.clear()
    ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=0.005)
    ddp.register_comm_hook(compressor, watching)
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, 2)
    names = list(SHAPES)
    for step in range(4):
        gradients = [targets(SHAPES, r, step) for r in range(2)]
        # Gradients become ready in another order on each rank; the buckets are those of rank 0.
        order = names[dist.get_rank() :] + names[: dist.get_rank()]
        got = exchange(ddp, gradients[dist.get_rank()], order)
        assert_same_bits(got, simulation.average(gradients))
    _assert_residuals(compressor, simulation)
    # All in one bucket at first, then in several, in the order of rank 0's first backward pass.
    assert seen == [["a", "b", "c"], *3 * [["c", "b"], ["a"]]]


@on_ranks(2, launcher="torchrun")
def test_accumulation_without_synchronization() -> None:
    for view in (False, True):
        ddp, _ = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), gradient_as_bucket_view=view)
        simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, 2)
        for step in range(3):
            halves = [[targets(SHAPES, r, 2 * step + half) for half in (0, 1)] for r in range(2)]
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(halves[dist.get_rank()][0]).backward()
            ddp(halves[dist.get_rank()][1]).backward()
            summed = [{n: first[n] + second[n] for n in SHAPES} for first, second in halves]
            assert_same_bits(gradients_of(ddp), simulation.average(summed))


@on_ranks(2, launcher="torchrun")
def test_a_parameter_that_no_rank_uses_keeps_its_residual() -> None:
    """DDP throws its average away: what would have been sent of the residual must not be lost."""
    for view in (False, True):
        ddp, compressor = distributed(
            Probe(SHAPES),
            OneBit(),
            ErrorFeedback(),
            find_unused_parameters=True,
            gradient_as_bucket_view=view,
        )
        rank = dist.get_rank()
        exchange(ddp, targets(SHAPES, rank, 0))
        before = compressor.state_dict()["tensors"]["b"]["residual"].clone()
        got = exchange(ddp, targets(SHAPES, rank, 1), ["a", "c"])
        assert "b" not in got
        assert torch.equal(compressor.state_dict()["tensors"]["b"]["residual"], before)
        # Gradients that were not set to None stay as they are, as with any hook.
        exchange(ddp, targets(SHAPES, rank, 2))
        kept = gradients_of(ddp)["b"]
        ddp.module.a.grad = ddp.module.c.grad = None
        ddp(targets(SHAPES, rank, 3), ["a", "c"]).backward()
        assert torch.equal(gradients_of(ddp)["b"], kept)


@on_ranks(2, launcher="torchrun")
def test_several_buckets_with_unused_parameters() -> None:
    """DDP makes several buckets in the first step only with find_unused_parameters, beyond 1 MB."""
    shapes = {"a": (600, 600), "b": (600, 600), "c": (3000,)}
    ddp, compressor = distributed(
        Probe(shapes), OneBit(), ErrorFeedback(), find_unused_parameters=True
    )
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), shapes, 2)
    for step in range(3):
        gradients = [targets(shapes, r, step) for r in range(2)]
        gradients[1]["a"].zero_()
        got = exchange(
            ddp, gradients[dist.get_rank()], ["b", "c"] if dist.get_rank() == 1 else None
        )
        assert_same_bits(got, simulation.average(gradients))
    _assert_residuals(compressor, simulation)


@on_ranks(2, launcher="torchrun")
def test_a_parameter_in_another_order_of_memory() -> None:
    for view in (False, True):
        model = Probe({"a": (6, 10, 5, 5), "b": (70, 40)})
        model.to(memory_format=torch.channels_last)
        model.b = torch.nn.Parameter(torch.zeros(40, 70).t())
        shapes = {"a": (6, 10, 5, 5), "b": (70, 40)}
        ddp, _ = distributed(model, OneBit("column"), ErrorFeedback(), gradient_as_bucket_view=view)
        simulation = Simulation("allgather", OneBit("column"), ErrorFeedback(), shapes, 2)
        for step in range(3):
            gradients = [targets(shapes, r, step) for r in range(2)]
            got = exchange(ddp, gradients[dist.get_rank()])
            assert_same_bits(got, simulation.average(gradients))
        assert not model.a.grad.is_contiguous() and not model.b.grad.is_contiguous()


@on_ranks(3, launcher="torchrun")
def test_process_group() -> None:
    members = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(hvdc.ExchangeError, match="with this rank in it"):
            hvdc.Compressor(Probe(SHAPES), OneBit(), process_group=members)
        return
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), process_group=members)
    with pytest.raises(ValueError, match="expected the model's own"):
        hvdc.Compressor(ddp, OneBit(), process_group=dist.group.WORLD)
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, 2)
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in (0, 2)]
        got = exchange(ddp, targets(SHAPES, dist.get_rank(), step))
        assert_same_bits(got, simulation.average(gradients))
    _assert_residuals(compressor, simulation)


@on_ranks(3, launcher="torchrun")
def test_a_compressor_that_is_registered_with_a_model_of_other_ranks() -> None:
    """It would average among its own ranks; a copy has none yet, and takes the model's."""
    members = dist.new_group([0, 2])
    model = Probe(SHAPES)
    of_all, again = hvdc.Compressor(model, NoCompression()), dist.new_group([0, 1, 2])
    hvdc.register(DistributedDataParallel(model, process_group=again), of_all)
    if dist.get_rank() == 1:
        return
    model, compressor = copy.deepcopy((model, of_all))
    ddp = DistributedDataParallel(model, process_group=members)
    with pytest.raises(ValueError, match=r"group, ranks \[0, 2\], got one of ranks \[0, 1, 2\]"):
        hvdc.register(ddp, of_all)
    hvdc.register(ddp, compressor)
    got = exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    everybodys = [targets(SHAPES, rank, 0) for rank in (0, 2)]
    for name, one in got.items():
        np.testing.assert_allclose(one, np.mean([each[name] for each in everybodys], 0), rtol=1e-6)


class _Checkpointed(torch.nn.Module):
    """Every layer a backward pass of its own within the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50, 50) for _ in range(4))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self._reentrant:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        return x


@on_ranks(2, launcher="torchrun")
def test_parameters_without_elements() -> None:
    shapes = {"a": (3000,), "empty": (0, 7), "none": (0,)}
    ddp, _ = distributed(Probe(shapes), OneBit(), ErrorFeedback(), bucket_cap_mb=1e-6)
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), shapes, 2)
    for step in range(3):
        gradients = [targets(shapes, r, step) for r in range(2)]
        got = exchange(ddp, gradients[dist.get_rank()])
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(2, launcher="torchrun")
def test_reentrant_checkpoints() -> None:
    results = []
    for reentrant in (False, True):
        ddp, compressor = distributed(
            _Checkpointed(reentrant), OneBit(), ErrorFeedback(), bucket_cap_mb=0.001
        )
        generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        for _ in range(3):
            x = torch.randn(8, 50, generator=generator, requires_grad=True)
            ddp.zero_grad()
            ddp(x).square().sum().backward()
        assert compressor.counters.steps == 3
        results.append(gradients_of(ddp))
    assert_same_bits(*results)


@on_ranks(2, launcher="torchrun")
def test_two_models_in_one_backward_pass() -> None:
    shapes = [{"a": (3000,), "b": (50, 60)}, {"c": (2000,), "d": (30, 90)}]
    models = [distributed(Probe(s), OneBit(), ErrorFeedback())[0] for s in shapes]
    simulations = [Simulation("allgather", OneBit(), ErrorFeedback(), s, 2) for s in shapes]
    for step in range(3):
        gradients = [[targets(s, r, step) for r in range(2)] for s in shapes]
        for ddp in models:
            ddp.zero_grad()
        losses = [ddp(g[dist.get_rank()]) for ddp, g in zip(models, gradients, strict=True)]
        (losses[0] + losses[1]).backward()
        for ddp, simulation, all_ranks in zip(models, simulations, gradients, strict=True):
            assert_same_bits(gradients_of(ddp), simulation.average(all_ranks))


@on_ranks(2, launcher="torchrun")
def test_the_codec_of_an_installed_package_works_by_name() -> None:
    with installed():
        codec = codec_class("test", "codec", "twobit")()
        for exchange_name in ("allgather", "two_shot"):
            ddp = DistributedDataParallel(Probe(SHAPES), bucket_cap_mb=0.01)
            options = {"exchange": exchange_name, "threshold": 0}
            ddp.register_comm_hook(hvdc.Compressor(ddp, "twobit", **options), hvdc.hook)
            simulation = Simulation(exchange_name, codec, codec.feedback, SHAPES, 2)
            for step in range(3):
                gradients = [targets(SHAPES, r, step) for r in range(2)]
                got = exchange(ddp, gradients[dist.get_rank()])
                assert_same_bits(got, simulation.average(gradients))


@on_ranks(1, launcher="torchrun")
def test_collectives_of_a_single_rank() -> None:
    """A check on one device has them run; the results are the same bits."""
    started: list[str] = []
    start = Collectives.start

    def noted(self: Collectives, collective: Collective) -> Any:
        if collective.message.numel() > 48:  # Not a comparison.
            started.append(collective.kind)
        return start(self, collective)

    for name in ("allgather", "two_shot", "hierarchical"):
        got = []
        for skips in (True, False):
            started.clear()
            with (
                mock.patch.object(Collective, "skips_alone", skips),
                mock.patch.object(Collectives, "start", noted),
            ):
                ddp, _ = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange=name)
                got += [exchange(ddp, targets(SHAPES, 0, step)) for step in range(2)][-1:]
            assert ({"all_gather"} <= set(started)) == (not skips), (name, started)
        assert_same_bits(got[1], got[0])


@on_ranks(4, launcher="two nodes")
def test_some_layers_by_way_of_hosts() -> None:
    """Although the compressor's own exchange does not need them."""
    feedback = ErrorFeedback()
    layers = {"a": Route(OneBit(), exchange="hierarchical", inner=Int8())}
    ddp, _ = distributed(Probe(SHAPES), OneBit(), feedback, layers=layers)
    simulations = {
        name: Simulation(exchange_name, OneBit(), feedback, SHAPES, 4, local=2, inner=inner)
        for name, exchange_name, inner in (("a", "hierarchical", Int8()), ("b", "two_shot", None))
    }
    for step in range(3):
        gradients = [targets(SHAPES, rank, step) for rank in range(4)]
        got = exchange(ddp, gradients[dist.get_rank()])
        for name, simulation in simulations.items():
            assert_same_bits({name: got[name]}, {name: simulation.average(gradients)[name]})
