"""FSDP2 on real ranks: every shard's average is the reference's."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import hvd_compress.fsdp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from tests.contract.cases import FLAT, FULL, ROWS, USUAL
from tests.fsdp.probes import (
    SHAPES,
    Beside,
    Net,
    assert_gradients_are_alike,
    assert_replicas_are_alike,
    backward,
    gradient_dtypes,
    gradients_of,
    make,
    mesh_of,
    of_today,
    shard,
)
from tests.ranks import on_ranks
from tests.torch_models import (
    DEVICE,
    assert_same_bits,
    on_arrays,
    targets,
    two_valued,
    unequal_threads,
)


def _every_codec(replicas: int) -> None:
    mesh = mesh_of(replicas)
    for exchange in FLAT:
        for codec, feedback in ROWS[exchange]:
            net, compressor = make(mesh, codec, feedback, exchange=exchange, seed=7)
            beside = Beside(mesh, exchange, codec, feedback, seed=7)
            for step in range(3):
                got = backward(net, targets(SHAPES, dist.get_rank(), step))
                beside.assert_same(got, beside.step(step))
            if feedback.enabled:
                beside.assert_kept(compressor)
            assert compressor.counters.steps == 3


@on_ranks(4, launcher="torchrun")
def test_every_codec_on_two_replicas_of_two_shards() -> None:
    _every_codec(2)


@on_ranks(4, launcher="torchrun")
def test_every_codec_on_four_replicas_without_shards() -> None:
    _every_codec(4)


@on_ranks(4, launcher="torchrun")
def test_replicas_with_other_numbers_of_threads_get_the_same_bits() -> None:
    mesh, shapes = mesh_of(2), {"first.a": (600, 701), "second.b": (2049, 65)}
    with unequal_threads(mesh.get_local_rank("replicate")):
        for exchange in FLAT:
            net, _ = make(mesh, *USUAL[exchange], shapes=shapes, exchange=exchange)
            for step in range(2):
                backward(net, targets(shapes, dist.get_rank(), step))
                assert_gradients_are_alike(mesh, net)


def _the_default_exchange(replicas: int, exchange: str) -> None:
    mesh = mesh_of(replicas)
    net, compressor = make(mesh, *USUAL[exchange])
    beside = Beside(mesh, exchange, *USUAL[exchange])
    for step in range(2):
        assert_same_bits(backward(net, targets(SHAPES, dist.get_rank(), step)), beside.step(step))
    beside.assert_kept(compressor)
    route = compressor.routes()["first.a"]
    assert (route.exchange, route.reason) == (exchange, f"auto, {replicas} ranks")


@on_ranks(4, launcher="torchrun")
def test_the_default_exchange_of_two_and_of_four_replicas() -> None:
    """The number of replicas decides, not that of all ranks."""
    _the_default_exchange(2, "allgather")
    _the_default_exchange(4, "two_shot")


@on_ranks(4, launcher="torchrun")
def test_owner_steps_of_shards() -> None:
    """The owner step begins with a cold start."""
    mesh, step = mesh_of(2), hvdc.AdaGrad(initial=0.25)
    options: dict[str, Any] = {"warmup_steps": 1, "owner_step": step, "exchange": "two_shot"}
    net, compressor = make(mesh, OneBit("column"), FULL, **options)
    beside = Beside(
        mesh,
        "two_shot",
        OneBit("column"),
        FULL,
        warmup_steps=1,
        owner_step=on_arrays(step),
    )
    for number in range(3):
        got = backward(net, targets(SHAPES, dist.get_rank(), number))
        assert_same_bits(got, beside.step(number))
    beside.assert_kept(compressor)


@on_ranks(4, launcher="torchrun")
def test_replicas_begin_and_stay_alike() -> None:
    """Although each rank had other parameters before."""
    mesh = mesh_of(2)
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(
        torch.nn.Linear(30, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 9)
    )
    net[1].running_mean += dist.get_rank() // 2
    net = shard(net, mesh)
    hvdc.Compressor(net, OneBit(), process_group=mesh.get_group("replicate"), threshold=64)
    assert_replicas_are_alike(mesh, net)
    assert not net[1].running_mean.any()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 30)).square().sum().backward()
        optimizer.step()
    assert_replicas_are_alike(mesh, net)


@on_ranks(2, launcher="torchrun")
def test_half_precision() -> None:
    """Averages have the dtype in which FSDP2 reduces: from PyTorch 2.15 on, by default the parameter's."""
    mesh = mesh_of(2)
    for policy in (
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ):
        compute = policy.param_dtype or torch.float32
        dtype = policy.reduce_dtype or (torch.float32 if gradient_dtypes else compute)

        def rounded(
            _: int, gradients: dict[str, torch.Tensor], compute: torch.dtype = compute
        ) -> None:
            for gradient in gradients.values():
                gradient.copy_(gradient.to(compute))

        net, compressor = make(
            mesh, *USUAL["two_shot"], exchange="two_shot", sharding={"mp_policy": policy}
        )
        beside = Beside(mesh, "two_shot", *USUAL["two_shot"], dtype=dtype)
        for step in range(2):
            gradients = targets(SHAPES, dist.get_rank(), step)
            gradients = {n: g.to(compute) for n, g in gradients.items()}
            assert_same_bits(backward(net, gradients), beside.step(step, rounded))
        beside.assert_kept(compressor)


@on_ranks(4, launcher="torchrun")
def test_parameters_that_are_cut_along_another_dimension() -> None:
    shapes = {"first.a": (40, 170), "second.c": (8, 4, 5, 5)}
    mesh = mesh_of(2)
    cut = {"shard_placement_fn": lambda parameter: Shard(1)}
    net, compressor = make(mesh, OneBit(), FULL, shapes=shapes, sharding=cut)
    beside = Beside(mesh, "allgather", OneBit(), FULL, shapes=shapes, dimension=1)
    for step in range(3):
        got = backward(net, targets(shapes, dist.get_rank(), step))
        assert_same_bits(got, beside.step(step))
    beside.assert_kept(compressor)


@on_ranks(4, launcher="torchrun")
def test_each_parameter_its_own_route() -> None:
    mesh = mesh_of(2)
    options = {"threshold": 100, "exclude": ["first.b"], "layers": {"second.*": Int8()}}
    net, compressor = make(mesh, OneBit(), FULL, **options)
    expected = Beside(mesh, "allgather", OneBit(), FULL)
    eight = Beside(mesh, "allgather", Int8(), ErrorFeedback(0.0))
    for step in range(2):
        got = backward(net, targets(SHAPES, dist.get_rank(), step))
        encoded, others = expected.step(step), eight.step(step)
        assert torch.equal(got["first.a"], encoded["first.a"])
        assert torch.equal(got["second.c"], others["second.c"])
        mean = sum(targets(SHAPES, rank, step)["first.b"] for rank in range(4)) / 4
        part = torch.chunk(mean, 2)[mesh.get_local_rank("shard")]
        torch.testing.assert_close(got["first.b"], part)
    routes = compressor.routes()
    assert {n for n, r in routes.items() if r.uncompressed} == {"first.b", "second.tiny"}


@on_ranks(4, launcher="torchrun")
def test_infinity_in_one_shard_leaves_no_trace_in_any() -> None:
    mesh = mesh_of(2)
    for exchange in FLAT:
        net, compressor = make(mesh, *USUAL[exchange], exchange=exchange)
        rank = dist.get_rank()
        for step in range(2):
            backward(net, targets(SHAPES, rank, step))
        before = copy.deepcopy(compressor.state_dict()["tensors"])
        bad = targets(SHAPES, rank, 2)
        if rank == 3:
            bad["first.a"][0, 17] = math.inf  # Of the first shard.
        got = backward(net, bad)
        assert bool(got["first.a"].isfinite().all()) == (mesh.get_local_rank("shard") == 1)
        after = compressor.state_dict()["tensors"]
        for name in SHAPES:
            for one, other in (
                (before[name], after[name]),
                (before[name]["owned"], after[name]["owned"]),
            ):
                if one is not None and one["residual"] is not None:
                    assert torch.equal(one["residual"], other["residual"])
        got = backward(net, targets(SHAPES, rank, 3))
        assert all(one.isfinite().all() for one in got.values())


@on_ranks(2, launcher="torchrun")
def test_residuals_follow_the_loss_scale() -> None:
    mesh = mesh_of(2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    net, _ = make(mesh, OneBit(), FULL, grad_scaler=scaler)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    for step, scale in enumerate((4.0, 4.0, 0.5)):
        scaler.scale(torch.ones(()))  # As a training loop does first.
        scaler.update(scale)
        got = backward(
            net, {n: scale * g for n, g in targets(SHAPES, dist.get_rank(), step).items()}
        )
        assert_same_bits({n: g / scale for n, g in got.items()}, beside.step(step))


@of_today
@on_ranks(4, launcher="torchrun")
def test_parameters_that_are_frozen_or_not_used() -> None:
    """A rank that does not use a parameter sends zeros, if FSDP2 is asked for them."""
    mesh = mesh_of(2)
    net, _ = make(mesh, OneBit(), FULL)
    net.set_reduce_scatter_unused_params(True)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    for step in range(3):
        gradients = targets(SHAPES, dist.get_rank(), step)
        if dist.get_rank() == 1:
            del gradients["first.b"]

        def without(rank: int, one: dict[str, torch.Tensor]) -> None:
            if rank == 1:
                one["first.b"].zero_()

        assert_same_bits(backward(net, gradients), beside.step(step, without))
    net.first.a.requires_grad_(False)
    got = backward(net, targets(SHAPES, dist.get_rank(), 3))
    expected = beside.step(3)
    del expected["first.a"]
    assert_same_bits(got, expected)


@on_ranks(4, launcher="torchrun")
def test_torch_compile() -> None:
    mesh = mesh_of(2)
    net = shard(Net(SHAPES), mesh)
    compiled = torch.compile(net, backend="aot_eager")
    compressor = hvdc.Compressor(compiled, Route(OneBit(), FULL), mesh=mesh, threshold=0)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    assert list(compressor.routes()) == list(SHAPES)
    for step in range(3):
        net.zero_grad()
        compiled(targets(SHAPES, dist.get_rank(), step)).backward()
        assert_same_bits(gradients_of(net), beside.step(step))


@on_ranks(4, launcher="torchrun")
def test_a_model_that_was_made_without_memory() -> None:
    """FSDP2's own way for large models: sharded on the meta device, and then filled."""
    mesh = mesh_of(2)
    net = shard(Net(SHAPES).to("meta"), mesh)
    net.to_empty(device=DEVICE)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    compressor = hvdc.Compressor(net, Route(OneBit(), FULL), mesh=mesh, threshold=0)
    assert_replicas_are_alike(mesh, net)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    for step in range(2):
        assert_same_bits(backward(net, targets(SHAPES, dist.get_rank(), step)), beside.step(step))
    beside.assert_kept(compressor)


@on_ranks(2, launcher="torchrun")
def test_routes_are_those_of_parameters_that_are_trained() -> None:
    net = Net(SHAPES)
    net.first.requires_grad_(False)
    mesh = mesh_of(2)
    compressor = hvdc.Compressor(shard(net, mesh), Int8(), mesh=mesh)
    assert list(compressor.routes()) == ["second.c", "second.tiny"]
    net.first.a.requires_grad_(True)
    assert list(compressor.routes()) == ["first.a", "second.c", "second.tiny"]


@on_ranks(2, launcher="torchrun")
def test_any_order_of_sharding_freezing_and_making_the_compressor() -> None:
    """One-bit codes carry these gradients without error: each result is the average."""
    mesh = mesh_of(2)
    for order in (("shard", "make", "turn"), ("shard", "turn", "make"), ("turn", "shard", "make")):
        for trained in (False, True):
            net = Net(SHAPES)
            net.first.a.requires_grad_(trained)
            for step, event in enumerate((*order, "step", "step", "turn", "step", "turn", "step")):
                if event == "turn":
                    trained = not trained
                    net.first.a.requires_grad_(trained)
                elif event == "shard":
                    shard(net, mesh)
                elif event == "make":
                    hvdc.Compressor(net, OneBit(), mesh=mesh, threshold=100)
                else:
                    each = [two_valued(SHAPES, rank, step) for rank in range(2)]
                    got = backward(net, each[dist.get_rank()])
                    assert got.keys() == SHAPES.keys() - ([] if trained else ["first.a"])
                    for name, one in got.items():
                        torch.testing.assert_close(one, (each[0][name] + each[1][name]) / 2)
