"""Encoded gradients within a shard group on real ranks: every shard is the reference's."""

from __future__ import annotations

import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import BF16, ECQ, FP16, Codec, Int8, OneBit, Ternary
from hvd_compress.exchanges.comm import Collective
from hvd_compress.fsdp.reduce_scatter import _factor
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.encoded import EncodedCollectives
from tests.contract.cases import FULL
from tests.fsdp.probes import (
    SHAPES,
    Net,
    assert_replicas_are_alike,
    backward,
    gradients_of,
    make,
    mesh_of,
    of_today,
    shard,
)
from tests.fsdp.shard_groups import BesideBoth, ShardGroup
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, assert_same_bits, targets

CODECS = (
    Int8(),
    Int8("linear", "tensor"),
    Int8("static", 64, offset=2),
    FP16(),
    BF16(),
    ECQ(7, "linf", 64),
    ECQ(4, "l2", 512),
    Ternary(64),
)


def _everybodys(step: int) -> list[dict[str, torch.Tensor]]:
    return [targets(SHAPES, rank, step) for rank in range(dist.get_world_size())]


def _alone(codec: Codec, **options: Any) -> tuple[Any, hvdc.CompressedReduceScatter]:
    """A model that all ranks share out."""
    net = shard(Net(SHAPES), mesh_of(1), **options)
    return net, hvdc.CompressedReduceScatter(net, codec)


def _beside(codec: Codec, **options: Any) -> ShardGroup:
    return ShardGroup(range(dist.get_world_size()), dist.get_rank(), codec, **options)


def _every_codec() -> None:
    size = dist.get_world_size()
    for codec in CODECS:
        net = shard(Net(SHAPES), mesh_of(1))
        scatter = hvdc.CompressedReduceScatter(net, codec, seed=5)
        group = _beside(codec, seed=5)
        for step in range(2):
            everybodys = _everybodys(step)
            got = backward(net, everybodys[dist.get_rank()])
            assert_same_bits(got, group.reduced(everybodys))
        counters = scatter.counters
        assert counters.steps == 2
        elements = sum(
            size * (-(-shape[0] // size)) * math.prod(shape[1:]) for shape in SHAPES.values()
        )
        assert counters.encoded_elements == 2 * elements
        assert counters.uncompressed_bytes == 8 * elements
        assert counters.message_bytes < counters.uncompressed_bytes / 1.9
        assert counters.wire_bytes == counters.message_bytes * (size - 1) / size
        scatter.reset_counters()
        assert scatter.counters.message_bytes == 0


@on_ranks(2, launcher="torchrun")
def test_every_codec_between_two_ranks() -> None:
    _every_codec()


@on_ranks(4, launcher="torchrun")
def test_every_codec_between_four_ranks() -> None:
    _every_codec()


@on_ranks(4, launcher="torchrun")
def test_beside_a_compressor_of_the_replicas() -> None:
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL)
    scatter = hvdc.CompressedReduceScatter(net, ECQ(7, "linf", 64))
    beside = BesideBoth(mesh, ECQ(7, "linf", 64), "allgather", OneBit(), FULL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        got = backward(net, targets(SHAPES, dist.get_rank(), step))
        assert_same_bits(got, beside.step(step))
        optimizer.step()
    beside.assert_kept(compressor)
    assert_replicas_are_alike(mesh, net)
    assert scatter.counters.steps == compressor.counters.steps == 3


@on_ranks(4, launcher="torchrun")
def test_on_a_mesh_with_replicas_of_fsdp2s_own() -> None:
    mesh = mesh_of(2)
    net = Net(SHAPES)
    for module in (*net.children(), net):
        fully_shard(module, mesh=mesh)
    hvdc.CompressedReduceScatter(net, "int8")
    own = mesh.get_local_rank("shard")
    everybodys = _everybodys(0)
    replicas = [
        ShardGroup(ranks, own, Int8()).reduced([everybodys[rank] for rank in ranks])
        for ranks in mesh.mesh.tolist()
    ]
    got = backward(net, everybodys[dist.get_rank()])
    assert_same_bits(
        got, {name: (one + replicas[1][name]) / 2 for name, one in replicas[0].items()}
    )
    assert_replicas_are_alike(mesh, net)


@on_ranks(2, launcher="torchrun")
def test_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net, _ = _alone(Int8(), mp_policy=policy)
    group = _beside(Int8(), dtype=torch.bfloat16)
    for step in range(2):
        everybodys = [
            {name: one.bfloat16() for name, one in each.items()} for each in _everybodys(step)
        ]
        assert_same_bits(backward(net, everybodys[dist.get_rank()]), group.reduced(everybodys))


@on_ranks(2, launcher="torchrun")
def test_a_model_that_was_made_without_memory() -> None:
    """The model may get its memory before or after the call."""
    for early in (True, False):
        net = shard(Net(SHAPES).to("meta"), mesh_of(1))
        if early:
            net.to_empty(device=DEVICE)
        hvdc.CompressedReduceScatter(net, Int8())
        net.to_empty(device=DEVICE)
        expected = _beside(Int8()).reduced(_everybodys(0))
        assert_same_bits(backward(net, _everybodys(0)[dist.get_rank()]), expected)


@on_ranks(2, launcher="torchrun")
def test_a_divisor_of_the_users_own() -> None:
    """FSDP2 multiplies in the collective then, which Gloo itself cannot."""
    for forced in (False, True):
        net, _ = _alone(Int8())
        for module in (*net.children(), net):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(forced)
        group = _beside(Int8(), factor=1 if forced else 1 / 3)
        expected = group.reduced(_everybodys(0))
        got = backward(net, _everybodys(0)[dist.get_rank()])
        assert_same_bits(got, {n: one / 3 if forced else one for n, one in expected.items()})
    with pytest.raises(ValueError, match=r"SUM, AVG or PREMUL_SUM, got RedOpType\.MAX"):
        _factor(dist.ReduceOp.MAX, 2)


@on_ranks(4, launcher="torchrun")
def test_infinity_is_seen_by_every_rank() -> None:
    for codec in (Int8(), FP16()):
        net, _ = _alone(codec)
        bad = targets(SHAPES, dist.get_rank(), 0)
        if dist.get_rank() == 2:
            bad["first.a"][0, 17] = math.inf  # Of the first rank's shard.
        got = backward(net, bad)
        assert not got["first.a"].isfinite().any() and not got["first.b"].isfinite().any()
        assert got["second.c"].isfinite().all()
        got = backward(net, targets(SHAPES, dist.get_rank(), 1))
        assert all(one.isfinite().all() for one in got.values())


@of_today
@on_ranks(2, launcher="torchrun")
def test_what_it_is_not_for() -> None:
    good = shard(Net(SHAPES), mesh_of(1))
    hooked = shard(Net(SHAPES), mesh_of(1))
    hooked.second.set_custom_reduce_scatter(mock.Mock())
    double = shard(Net(SHAPES, torch.float64), mesh_of(1))
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (Net(SHAPES), Int8(), {}, TypeError, r"went through fully_shard\(module\).*got Net, which"),
        (3, Int8(), {}, TypeError, "went through fully_shard.*, got int"),
        (
            hooked,
            Int8(),
            {},
            ValueError,
            "second: expected .* own reduce-scatter, got one with Mock",
        ),
        (good, 8, {}, TypeError, "codec: expected a codec .* such as Int8.*, or .* name, got 8"),
        (good, "int9", {}, ValueError, "codec: expected one of .*, got 'int9'"),
        (good, OneBit(), {}, ValueError, "trains without error feedback, .* got OneBit"),
        (good, ECQ(coding="entropy"), {}, ValueError, "fixed length, got ECQ.*coding='plain'"),
        (good, Int8(), {"seed": -1}, ValueError, r"seed: expected an integer in \[0, 2"),
        (good, Int8(), {"threads": 0}, ValueError, r"threads: expected an integer in \[1, 1024"),
        (
            double,
            Int8(),
            {},
            TypeError,
            "first: expected gradients of float32, .* got float64: set",
        ),
    ]
    for model, codec, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            hvdc.CompressedReduceScatter(model, codec, **options)
    for net in (good, hooked):  # Nothing was set.
        usual = type(net.first._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm)
        assert usual.__name__ == "DefaultReduceScatter"
    hvdc.CompressedReduceScatter(good, Int8())
    with pytest.raises(ValueError, match=r"first: expected .* own reduce-scatter, got one with"):
        hvdc.CompressedReduceScatter(good, Int8())


@on_ranks(2, launcher="torchrun")
def test_ranks_that_disagree() -> None:
    rank = dist.get_rank()
    net = shard(Net(SHAPES), mesh_of(1))
    with pytest.raises(hvdc.ExchangeError, match="codec group: 64 on rank 0, 128 on rank 1"):
        hvdc.CompressedReduceScatter(net, Int8(group=64 * (rank + 1)))
    with pytest.raises(hvdc.ExchangeError, match="seed: 0 on rank 0, 1 on rank 1"):
        hvdc.CompressedReduceScatter(net, Int8(), seed=rank)
    for codec, threads, own in (
        (OneBit(), None, "trains without error feedback"),
        (Int8(), 0, "threads: expected an integer"),
    ):
        if rank == 1:
            with pytest.raises(ValueError, match=own):
                hvdc.CompressedReduceScatter(net, codec, threads=threads)
        else:
            with pytest.raises(hvdc.ExchangeError, match=rf"ValueError: .*{own}.* on rank 1"):
                hvdc.CompressedReduceScatter(net, Int8())
    hvdc.CompressedReduceScatter(net, Int8())
    gradients = targets(SHAPES, rank, 0)
    if rank == 1:
        del gradients["second.c"]
    with pytest.raises(hvdc.ExchangeError, match=r"shape: .* on rank 0, .* on rank 1"):
        backward(net, gradients)


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_fails() -> None:
    """An error on every rank at the end of the backward pass, and none in the next one."""
    rank = dist.get_rank()
    net, _ = _alone(Int8())
    encode, start = EncodedCollectives._encode, Collectives.start
    sent_nothing = hvdc.ExchangeError, "gradients of second: expected a payload .* none from rank 1"
    altered = "gradients of first: rank 1's payload"
    if (
        DEVICE.type != "cpu"
    ):  # The host hears of it later, of one of the modules, and does not see zeros.
        sent_nothing = hvdc.PayloadError, "gradients of second: rank 1's payload"
        altered = "gradients of (first|second): rank 1's payload"

    def failing(self: Any, codec: Codec, parts: Any, size: int) -> torch.Tensor:
        if parts[0].numel() < 1000:  # Of the second module.
            raise ArithmeticError("on purpose")
        return encode(self, codec, parts, size)

    def altering(self: Any, collective: Collective) -> Any:
        if collective.kind == "all_to_all":
            collective.message[40] ^= 16  # For rank 0.
        return start(self, collective)

    cases: list[tuple[type, str, Any, list[tuple[type[Exception], str]]]] = [
        (
            EncodedCollectives,
            "_encode",
            failing,
            [sent_nothing, (ArithmeticError, "on purpose")],
        ),
        (
            Collectives,
            "start",
            altering,
            [
                (hvdc.PayloadError, altered),
                (hvdc.ExchangeError, f"PayloadError: {altered}"),
            ],
        ),
    ]
    for step, (owner, name, instead, errors) in enumerate(cases):
        kind, message = errors[rank]
        chosen = instead if rank == 1 else getattr(owner, name)
        with mock.patch.object(owner, name, chosen), pytest.raises(kind, match=message):
            backward(net, targets(SHAPES, rank, step))
        # A script that catches the error must not take what this rank could not decode for sums.
        failed = re.findall("gradients of ([a-z]+)", message) or ["second"]
        left = {n: one for n, one in gradients_of(net).items() if n.split(".")[0] in failed}
        spoiled = any(one.isnan().all() for one in left.values() if one.numel())
        assert spoiled or (rank, step) == (1, 1), left
        got = backward(net, targets(SHAPES, rank, step))
        assert all(one.isfinite().all() for one in got.values())
