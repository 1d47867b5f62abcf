"""FSDP2 on real ranks: every shard's average is the reference's, and what goes wrong is an error of all."""

from __future__ import annotations

import copy
import io
import math
import shutil
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import ECQ, ErrorFeedback, Int8, OneBit
from hvd_compress.torch_common.batch import Batch
from tests.contract.cases import FULL, ROWS, USUAL
from tests.fsdp.probes import (
    SHAPES,
    Beside,
    Net,
    assert_replicas_are_alike,
    backward,
    gradients_of,
    make,
    mesh_of,
    shard,
)
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

FLAT = ("allgather", "two_shot", "integer_sum")


def _every_codec(replicas: int) -> None:
    mesh = mesh_of(replicas)
    for exchange in FLAT:
        for codec, feedback in ROWS[exchange]:
            net, compressor = make(mesh, codec, feedback, exchange=exchange, seed=7)
            beside = Beside(mesh, exchange, codec, feedback, seed=7)
            for step in range(3):
                got = backward(net, targets(SHAPES, dist.get_rank(), step))
                assert_same_bits(got, beside.step(step))
            if feedback.enabled:
                beside.assert_kept(compressor)
            assert compressor.counters.steps == 3


@on_ranks(4, launcher="torchrun")
def test_every_codec_on_two_replicas_of_two_shards() -> None:
    _every_codec(2)


@on_ranks(4, launcher="torchrun")
def test_every_codec_on_four_replicas_without_shards() -> None:
    _every_codec(4)


@on_ranks(2, launcher="torchrun")
def test_every_codec_on_two_replicas_without_shards() -> None:
    _every_codec(2)


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
    hvdc.OneBit(net, process_group=mesh.get_group("replicate"), threshold=64)
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
    """In the dtype that FSDP2 reduces in."""
    mesh = mesh_of(2)
    for policy, dtype in (
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), torch.bfloat16),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16),
        (MixedPrecisionPolicy(param_dtype=torch.float16), torch.float16),
    ):
        net, compressor = make(
            mesh, *USUAL["two_shot"], exchange="two_shot", sharding={"mp_policy": policy}
        )
        beside = Beside(mesh, "two_shot", *USUAL["two_shot"], dtype=dtype)
        for step in range(2):
            gradients = targets(SHAPES, dist.get_rank(), step)
            if policy.param_dtype is not None:
                gradients = {n: g.to(dtype) for n, g in gradients.items()}
            assert_same_bits(backward(net, gradients), beside.step(step))
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
def test_gradients_that_pile_up() -> None:
    """Without any exchange, or with one among the shards only; what is averaged is the sum."""
    mesh = mesh_of(2)
    for wait in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        net, compressor = make(mesh, OneBit(), FULL)
        beside = Beside(mesh, "allgather", OneBit(), FULL)
        rank = dist.get_rank()
        for step in range(2):
            net.zero_grad()
            getattr(net, wait)(False)
            net(targets(SHAPES, rank, 2 * step)).backward()
            getattr(net, wait)(True)
            net(targets(SHAPES, rank, 2 * step + 1)).backward()

            def add(other: int, gradients: dict[str, torch.Tensor], step: int = step) -> None:
                for name, one in targets(SHAPES, other, 2 * step).items():
                    gradients[name] += one

            expected = beside.step(2 * step + 1, add)
            got = gradients_of(net)
            if wait == "set_requires_gradient_sync":
                assert_same_bits(got, expected)
            else:  # Added up in another order.
                for name in SHAPES:
                    close = torch.isclose(got[name], expected[name], rtol=1e-4, atol=1e-4)
                    assert close.float().mean() > 0.99 or not close.numel(), name
        assert compressor.counters.steps == 2


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
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    net, _ = make(mesh, OneBit(), FULL, grad_scaler=scaler)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    for step, scale in enumerate((4.0, 4.0, 0.5)):
        scaler.scale(torch.ones(()))  # As a training loop does first.
        scaler.update(scale)
        got = backward(
            net, {n: scale * g for n, g in targets(SHAPES, dist.get_rank(), step).items()}
        )
        assert_same_bits({n: g / scale for n, g in got.items()}, beside.step(step))


@on_ranks(4, launcher="torchrun")
def test_parameters_that_are_frozen_or_not_used() -> None:
    """Not used by one rank of a replica: zeros."""
    mesh = mesh_of(2)
    net, _ = make(mesh, OneBit(), FULL)
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


def _states(compressor: hvdc.Compressor) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, compressor.state_dict())
    return states


@on_ranks(4, launcher="torchrun")
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL, exchange="two_shot")
    beside = Beside(mesh, "two_shot", OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
        beside.step(step)
    file = io.BytesIO()
    torch.save(compressor.state_dict(), file)
    net, other = make(mesh, OneBit(), FULL, exchange="two_shot")
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for step in range(2, 4):
        got = backward(net, targets(SHAPES, dist.get_rank(), step))
        assert_same_bits(got, beside.step(step))
    states = _states(compressor)
    with pytest.raises(ValueError, match=r"expected the state of a rank with shard . of 2, got \["):
        other.load_state_dict(states[dist.get_rank() ^ 1])
    with pytest.raises(ValueError, match=r"expected rank ."):
        other.load_state_dict(states[dist.get_rank() ^ 2])


@on_ranks(4, launcher="torchrun")
def test_another_number_of_replicas() -> None:
    net, compressor = make(mesh_of(2), OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
    states = _states(compressor)
    # Two jobs of two ranks, each of one replica.
    meshes = [
        DeviceMesh("cpu", [ranks], mesh_dim_names=("replicate", "shard"))
        for ranks in ([0, 1], [2, 3])
    ]
    mesh = meshes[dist.get_rank() // 2]
    net, smaller = make(mesh, OneBit(), FULL)
    smaller.load_resized(states)
    place = mesh.get_local_rank("shard")
    for name, one in smaller.state_dict()["tensors"].items():
        kept = [state["tensors"][name]["residual"] for state in (states[place], states[2 + place])]
        if one["residual"] is not None:
            torch.testing.assert_close(one["residual"], sum(kept) / 2)
    backward(net, targets(SHAPES, dist.get_rank(), 2))
    net, another = make(mesh_of(4), OneBit(), FULL)
    with pytest.raises(
        ValueError, match=r"whose replicas had 1 shards, got .*2.*go on with as many"
    ):
        another.load_resized(states)


@on_ranks(4, launcher="torchrun")
def test_torch_distributed_checkpoint() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL)
    for step in range(2):
        backward(net, targets(SHAPES, dist.get_rank(), step))
    dcp.save({"compressor": hvdc.RankStates(compressor)}, checkpoint_id=folder[0])
    net, other = make(mesh, OneBit(), FULL)
    dcp.load({"compressor": hvdc.RankStates(other)}, checkpoint_id=folder[0])
    kept, loaded = (c.state_dict()["tensors"] for c in (compressor, other))
    for name in SHAPES:
        if kept[name]["residual"] is not None:
            assert torch.equal(kept[name]["residual"], loaded[name]["residual"])
        assert (
            kept[name]["step"]
            == loaded[name]["step"]
            == (2 if kept[name]["residual"] is not None else 0)
        )
    meshes = [
        DeviceMesh("cpu", [ranks], mesh_dim_names=("replicate", "shard"))
        for ranks in ([0, 1], [2, 3])
    ]
    net, smaller = make(meshes[dist.get_rank() // 2], OneBit(), FULL)
    states = hvdc.RankStates(smaller, saved_ranks=4)
    dcp.load({"compressor": states}, checkpoint_id=folder[0])
    assert smaller.residual_norm() > 0
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


@on_ranks(4, launcher="torchrun")
def test_torch_compile() -> None:
    mesh = mesh_of(2)
    net = shard(Net(SHAPES), mesh)
    compiled = torch.compile(net, backend="aot_eager")
    compressor = hvdc.Compressor(compiled, OneBit(), FULL, mesh=mesh, threshold=0)
    beside = Beside(mesh, "allgather", OneBit(), FULL)
    assert list(compressor.routes()) == list(SHAPES)
    for step in range(3):
        net.zero_grad()
        compiled(targets(SHAPES, dist.get_rank(), step)).backward()
        assert_same_bits(gradients_of(net), beside.step(step))


@on_ranks(4, launcher="torchrun")
def test_what_it_is_not_for() -> None:
    mesh = mesh_of(2)
    row = {"mesh": mesh}
    plain = Net(SHAPES)
    native = fully_shard(Net(SHAPES), mesh=mesh)
    good = shard(Net(SHAPES), mesh)
    with torch.device("meta"):
        meta = shard(Net(SHAPES), mesh)
    half = Net(SHAPES)
    fully_shard(half.first, mesh=mesh["shard"])
    hooked = shard(Net(SHAPES), mesh)
    hooked.first.set_all_reduce_hook(lambda output: None)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (plain, row, TypeError, r"went through fully_shard.*, got Net, which has none"),
        (3, row, TypeError, "went through fully_shard.*, got int"),
        (
            DistributedDataParallel(Net(SHAPES)),
            row,
            TypeError,
            "got DistributedDataParallel, which",
        ),
        (
            native,
            row,
            ValueError,
            "over a mesh of one dimension, .* got a mesh of 2: there, FSDP2 adds",
        ),
        (hooked, row, ValueError, "first: expected a module without an all-reduce hook"),
        (meta, row, ValueError, r"first.a: expected a parameter with memory, .*to_empty\(\)"),
        (half, row, ValueError, "second.c: expected a parameter that FSDP2 shards"),
        (good, {}, TypeError, "expected mesh=, .*, or process_group=, .*, got neither"),
        (good, {**row, "process_group": dist.group.WORLD}, TypeError, "got both"),
        (good, {"mesh": "cpu"}, TypeError, "expected a DeviceMesh, got str"),
        (good, {"mesh": mesh["shard"]}, ValueError, "expected two dimensions, .*, got 1"),
        (
            good,
            {"mesh": mesh_of(4)},
            ValueError,
            r"over along the second dimension, got \[. *\]|got \[",
        ),
        (
            good,
            {"process_group": dist.group.WORLD},
            ValueError,
            "expected ranks with the same shard",
        ),
        (
            good,
            {**row, "exchange": "hierarchical"},
            ValueError,
            "expected one of 'allgather', 'two",
        ),
        (good, {**row, "exchange": "integer_sum"}, ValueError, "evenly spaced levels"),
        (good, {**row, "exclude": ["third.*"]}, ValueError, "a pattern that matches"),
    ]
    for model, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            hvdc.OneBit(model, **options)
    hvdc.OneBit(good, **row)
    with pytest.raises(ValueError, match="expected a module without an all-reduce hook"):
        hvdc.OneBit(good, **row)
    dist.barrier()


@on_ranks(4, launcher="torchrun")
def test_ranks_that_disagree() -> None:
    """Before the first exchange, on every rank, also on those that have nothing to do with each other."""
    mesh = mesh_of(2)
    for odd in (0, 3):
        for codec, options, message in (
            (ECQ(), {}, "differ in"),
            (OneBit(), {"seed": 1}, "differ in"),
            (OneBit("column"), {"exchange": "two_shot"}, "differ in|contiguous groups"),
        ):
            net = shard(Net(SHAPES), mesh)
            mine = dist.get_rank() == odd
            chosen = options if mine else {}
            kinds = (hvdc.ExchangeError, ValueError)
            with pytest.raises(kinds, match=message):
                hvdc.Compressor(
                    net,
                    codec if mine else OneBit(),
                    FULL if not mine else _stable(codec),
                    mesh=mesh,
                    **chosen,
                )
            dist.barrier()
    net, compressor = make(mesh, OneBit(), FULL)
    backward(net, targets(SHAPES, dist.get_rank(), 0))
    if dist.get_rank() == 2:
        compressor.set_codec(Int8())
    else:
        compressor.set_codec(OneBit(512))
    with pytest.raises(hvdc.ExchangeError, match=r"differ in|averages of all shards"):
        backward(net, targets(SHAPES, dist.get_rank(), 1))
    dist.barrier()


def _stable(codec: Any) -> ErrorFeedback:
    return ErrorFeedback(0.01, 1.0) if isinstance(codec, ECQ) else FULL


@on_ranks(4, launcher="torchrun")
def test_a_rank_that_fails() -> None:
    """All ranks have an error after the backward pass, and no residual counts the step."""
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL, exchange="two_shot")
    backward(net, targets(SHAPES, dist.get_rank(), 0))
    before = copy.deepcopy(compressor.state_dict()["tensors"])
    place = mesh.get_local_rank("shard")
    error: tuple[type[Exception], str] = (hvdc.ExchangeError, "expected a payload from every rank")
    if place != 1:
        error = hvdc.ExchangeError, "expected averages of all shards"
    if dist.get_rank() == 3:
        error = ArithmeticError, "on purpose"
    failing = mock.Mock(side_effect=ArithmeticError("on purpose"))
    average = failing if dist.get_rank() == 3 else Batch.average
    with mock.patch.object(Batch, "average", average), pytest.raises(error[0], match=error[1]):
        backward(net, targets(SHAPES, dist.get_rank(), 1))
    after = compressor.state_dict()["tensors"]
    for name in SHAPES:
        if before[name]["residual"] is not None:
            assert torch.equal(before[name]["residual"], after[name]["residual"])
    dist.barrier()  # All of them are still there.


class _Stumbling(torch.autograd.Function):
    stumbles = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Stumbling.stumbles:
            raise ArithmeticError("on purpose")
        return gradient


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_Stumbling.apply(self.first(x)))


@on_ranks(2, launcher="torchrun")
def test_a_backward_pass_that_breaks_off() -> None:
    """The next ones are as if it had not been; but for the noise, which 1-bit SGD has none of."""
    mesh = mesh_of(2)
    results = []
    for stumbles in (False, True):
        net = shard(_Layers(), mesh)
        compressor = hvdc.OneBit(net, mesh=mesh, threshold=0)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(3):
            x = torch.randn(3, 40, generator=generator)
            if stumbles and step == 1:
                _Stumbling.stumbles = True
                with pytest.raises(ArithmeticError, match="on purpose"):
                    net(x).sum().backward()
                _Stumbling.stumbles = False
                net.reset_iter_state()
            net.zero_grad()
            net(x).sum().backward()
        assert compressor.counters.steps == 3
        results.append(gradients_of(net))
    assert_same_bits(*results)


class _Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x)
        return x


@on_ranks(2, launcher="torchrun")
def test_a_module_that_runs_twice() -> None:
    """An error on every rank, after which all can go on."""
    mesh = mesh_of(2)
    net = shard(_Twice(), mesh)
    compressor = hvdc.OneBit(net, mesh=mesh)
    x = torch.randn(3, 40, requires_grad=True)
    net(x, 1).sum().backward()
    before = compressor.state_dict()["tensors"]["layer.weight"]["residual"].clone()
    with pytest.raises(
        hvdc.ExchangeError, match="layer: expected its gradients once in a backward"
    ):
        net(x, 2).sum().backward()
    after = compressor.state_dict()["tensors"]["layer.weight"]["residual"]
    assert torch.equal(before, after)
