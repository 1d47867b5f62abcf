"""Errors under FSDP2 are raised on all ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.fsdp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ECQ, ErrorFeedback, Int8, OneBit
from hvd_compress.engine.batch import Batch
from hvd_compress.fsdp import compressor as of_fsdp
from tests.contract.cases import FULL
from tests.cuda.executors import emulated_library, late_kernels
from tests.fsdp.probes import (
    SHAPES,
    Layers,
    Net,
    Stumbling,
    assert_gradients_are_alike,
    assert_replicas_are_alike,
    backward,
    gradients_of,
    make,
    mesh_of,
    of_today,
    shard,
)
from tests.ranks import on_ranks
from tests.timeouts import timeout
from tests.torch_models import DEVICE, assert_same_bits, targets


@pytest.fixture(autouse=True)
def built() -> None:
    """Before the ranks start, which would build it at the same time."""
    emulated_library()


@on_ranks(4, launcher="torchrun")
def test_warnings_of_what_helps_nobody() -> None:
    """Nothing is compressed; a shard that is small on some ranks is no reason; OneBit with AdamW."""
    cases = (
        ({"first.a": (20, 1)}, 0, 1),
        ({"first.a": (3, 1000)}, 2000, 0),
        ({"first.a": (64, 64)}, 0, 0),
    )
    for shapes, threshold, times in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"threshold": threshold or 1024}
            net, _ = make(mesh_of(2), OneBit(), FULL, shapes=shapes, **options)
            optimizer = torch.optim.AdamW(net.parameters())
            for step in range(2):
                backward(net, targets(shapes, dist.get_rank(), step))
                optimizer.step()
        told = [str(one.message) for one in caught]
        assert sum("threshold=1024" in text for text in told) == times, told
        if not threshold:
            assert sum("got AdamW" in text for text in told) == 1 - times, told


@on_ranks(4, launcher="torchrun")
def test_what_it_is_not_for() -> None:
    mesh = mesh_of(2)
    row = {"mesh": mesh}
    plain = Net(SHAPES)
    native = fully_shard(Net(SHAPES), mesh=mesh)
    replicated = replicate(Net(SHAPES), mesh=mesh["replicate"])
    good = shard(Net(SHAPES), mesh)
    meta = shard(Net(SHAPES).to("meta"), mesh)
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
        (replicated, row, ValueError, r"got one of replicate\(\), .* hvd_compress.ddp; or call"),
        (hooked, row, ValueError, "first: expected a module without an all-reduce hook"),
        (meta, row, ValueError, r"first.a: expected a parameter with memory, .*to_empty\(\)"),
        (half, row, ValueError, "second.c: expected a parameter that FSDP2 shards"),
        (good, {}, TypeError, "or process_group=, .*, got neither: .* CompressedReduceScatter"),
        (good, {**row, "process_group": dist.group.WORLD}, TypeError, "got both"),
        (good, {"mesh": "cpu"}, TypeError, "expected a DeviceMesh, got str"),
        (good, {"mesh": mesh["shard"]}, ValueError, "expected two .*, got 1: .* CompressedReduce"),
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
            "expected one of 'auto', 'allgather', 'two",
        ),
        (
            good,
            {**row, "layers": {"first.a": Route(ECQ(), exchange="hierarchical", inner=Int8())}},
            ValueError,
            "first.a.exchange: expected one of 'auto', 'allgather', .*got 'hierarchical'",
        ),
        (
            good,
            {**row, "exchange": "integer_sum"},
            ValueError,
            "evenly spaced levels|memory of the CPU",
        ),
        (good, {**row, "exclude": ["third.*"]}, ValueError, "a pattern that matches"),
    ]
    for model, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            hvdc.Compressor(model, OneBit(), **options)
    hvdc.Compressor(good, OneBit(), **row)
    with pytest.raises(ValueError, match="expected a module without an all-reduce hook"):
        hvdc.Compressor(good, OneBit(), **row)


@on_ranks(4, launcher="torchrun")
def test_ranks_that_disagree() -> None:
    """Every rank raises an error before the first exchange, even a rank of other shards and replicas."""
    mesh = mesh_of(2)
    for odd in (0, 3):
        for codec, options, message in (
            (ECQ(), {}, "differ in"),
            (OneBit(), {"seed": 1}, "differ in"),
            (OneBit("column"), {"exchange": "two_shot"}, "differ in"),
        ):
            net = shard(Net(SHAPES), mesh)
            mine = dist.get_rank() == odd
            chosen = options if mine else {}
            kinds = (hvdc.ExchangeError, ValueError)
            with pytest.raises(kinds, match=message):
                hvdc.Compressor(
                    net,
                    Route(codec if mine else OneBit(), FULL if not mine else _stable(codec)),
                    mesh=mesh,
                    **chosen,
                )
            dist.barrier()
    net, compressor = make(mesh, OneBit(), FULL)
    backward(net, targets(SHAPES, dist.get_rank(), 0))
    with pytest.raises(
        hvdc.ExchangeError, match=r"(?s)OneBit.* on rank 0, 1, 3, .*Int8.* on rank 2"
    ):
        compressor.set_codec(Int8() if dist.get_rank() == 2 else OneBit(512))
    backward(net, targets(SHAPES, dist.get_rank(), 1))
    assert_gradients_are_alike(mesh, net)


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    """Those that hold something."""
    tensors = compressor.state_dict()["tensors"]
    kept = {n: t["residual"] for n, t in tensors.items() if t["residual"] is not None}
    return {n: one.clone() for n, one in kept.items() if bool(one.any())}


@on_ranks(4, launcher="torchrun")
def test_a_change_on_some_ranks() -> None:
    """They wait for all ranks of the mesh, and change nothing without them."""
    mesh, rank = mesh_of(2), dist.get_rank()
    net, compressor = make(mesh, OneBit(), FULL)
    backward(net, targets(SHAPES, rank, 0))
    saved = copy.deepcopy(compressor.state_dict())
    calls: dict[str, Callable[[], None]] = {
        "set_codec": lambda: compressor.set_codec(Int8()),
        "load_state_dict": lambda: compressor.load_state_dict(saved),
        "reset": compressor.reset,
    }
    for callers, missing in (([2], "0, 1, 3"), ([0, 2], "1, 3"), ([2, 3], "0, 1")):
        for name, call in calls.items():
            before = _residuals(compressor)
            if rank in callers:
                message = (
                    f"{name}: expected a call on every rank .* got none from rank {missing} in 2"
                )
                replicas = mesh.get_group("replicate")
                with timeout(replicas, 2), pytest.raises(hvdc.ExchangeError, match=message):
                    call()
            assert_same_bits(_residuals(compressor), before)
            dist.barrier()
            backward(net, targets(SHAPES, rank, 1))
            assert_gradients_are_alike(mesh, net)
    for call in calls.values():
        call()
        backward(net, targets(SHAPES, rank, 2))
        assert_replicas_are_alike(mesh, net)
        assert_gradients_are_alike(mesh, net)


@on_ranks(4, launcher="torchrun")
def test_a_change_on_all_ranks() -> None:
    """Whether gradients are encoded before it or not, and in the warm-up or after it."""
    mesh, rank = mesh_of(2), dist.get_rank()
    for kernels in (nullcontext, late_kernels):
        for codec, exchange, warmup in (
            ("onebit", "allgather", 0),
            ("onebit", "two_shot", 1),
            ("onebit", "allgather", 9),
            ("none", "allgather", 0),
        ):
            with kernels():
                net = shard(Net(SHAPES), mesh)
                options = {"threshold": 0, "exchange": exchange, "warmup_steps": warmup}
                compressor = hvdc.Compressor(net, codec, mesh=mesh, **options)
                saved = copy.deepcopy(compressor.state_dict())
                for step in range(2):
                    backward(net, targets(SHAPES, rank, step))
                for change in (
                    lambda made=compressor: made.set_codec(Int8()),
                    lambda made=compressor, state=saved: made.load_state_dict(state),
                ):
                    change()
                    for step in range(2):
                        backward(net, targets(SHAPES, rank, step))
                        assert_replicas_are_alike(mesh, net)
                        assert_gradients_are_alike(mesh, net)


def _stable(codec: Any) -> ErrorFeedback:
    return ErrorFeedback(0.01, 1.0) if isinstance(codec, ECQ) else FULL


@on_ranks(4, launcher="torchrun")
def test_a_rank_that_fails() -> None:
    """Every rank raises an error after the backward pass, and no residual counts the step."""
    mesh = mesh_of(2)
    net, compressor = make(mesh, OneBit(), FULL, exchange="two_shot")
    backward(net, targets(SHAPES, dist.get_rank(), 0))
    before = copy.deepcopy(compressor.state_dict()["tensors"])
    place = mesh.get_local_rank("shard")
    error: tuple[type[Exception], str] = (hvdc.ExchangeError, "expected a payload from every rank")
    if DEVICE.type != "cpu":  # Its kernels report zeros as an altered payload.
        error = hvdc.PayloadError, "rank 1's payload: expected the header"
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


@of_today
@on_ranks(4, launcher="torchrun")
def test_several_exchanges_in_a_backward_pass() -> None:
    """Such a pass cannot be undone as a whole: every rank raises an error, and an Inf or a NaN warns."""
    mesh = mesh_of(2)
    net = shard(Layers(), mesh)
    compressor = hvdc.Compressor(net, OneBit(), mesh=mesh, threshold=0)
    net.set_reduce_scatter_unused_params(True)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())

    def train(forwards: int, factor: float = 1.0) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the residuals before the pass, and the number of warnings about it."""
        before, losses = _residuals(compressor), []
        net.zero_grad()
        for _ in range(forwards):  # The second layer is reduced for each of them.
            losses.append(net(factor * torch.randn(3, 40, generator=generator)).square().sum())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.stack(losses).sum().backward()
        message = "to drop a whole backward pass, got 1 dropped of its 2 exchanges"
        return before, sum(message in str(one.message) for one in told)

    train(2)
    refused = pytest.raises(
        hvdc.ExchangeError, match="expected a backward pass with one exchange, got"
    )
    odd = dist.get_rank() == 3
    for factor, warned in (
        (1.0, 0),
        (float("nan") if odd else 1.0, 1),
        (torch.inf if odd else 1.0, 0),
    ):
        before, number = train(2, factor)
        assert number == warned
        after = _residuals(compressor)
        assert any(not torch.equal(one, before[name]) for name, one in after.items())
        with refused:
            compressor.drop_step()
        assert_same_bits(_residuals(compressor), after)
    for factor in (1.0, float("nan") if odd else 1.0):
        before, number = train(1, factor)
        assert number == 0
        compressor.drop_step()
        assert_same_bits(_residuals(compressor), before)


@of_today
@on_ranks(2, launcher="torchrun")
def test_a_backward_pass_that_breaks_off() -> None:
    """The next ones are as if it had not been; but for the noise, which 1-bit SGD has none of.

    Nor do gradients stay behind that were to be exchanged later. The compressor can be used in between.
    """
    mesh = mesh_of(2)
    results = []
    for stumbles, exchanges in ((False, True), (True, True), (True, False)):
        net = shard(Layers(), mesh)
        compressor = hvdc.Compressor(net, OneBit(), mesh=mesh, threshold=0)
        generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        for step in range(3):
            x = torch.randn(3, 40, generator=generator)
            if stumbles and step == 1:
                before = _residuals(compressor)
                Stumbling.stumbles = True
                net.set_requires_all_reduce(exchanges)
                with pytest.raises(ArithmeticError, match="on purpose"):
                    net(x).sum().backward()
                Stumbling.stumbles = False
                net.set_requires_all_reduce(True)
                if exchanges:
                    with pytest.raises(
                        hvdc.ExchangeError, match=r"or after model.reset_iter_state\(\)"
                    ):
                        compressor.state_dict()
                net.reset_iter_state()
                if exchanges:  # Otherwise, the last exchange is that of the step before.
                    compressor.drop_step()
                assert_same_bits(_residuals(compressor), before)
                compressor.set_codec(OneBit())
            net.zero_grad()
            net(x).sum().backward()
        assert compressor.counters.steps == 3
        results.append(gradients_of(net))
    for result in results[1:]:
        assert_same_bits(results[0], result)


@of_today
@on_ranks(2, launcher="torchrun")
def test_accumulation_that_starts_again() -> None:
    """``reset_iter_state()`` drops what earlier backward passes have added up, as in FSDP2's own HSDP.

    So it does where no gradient was reduced in the pass that failed. Without it, both keep that.
    """
    mesh = mesh_of(2)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    first, second = torch.randn(2, 3, 40, generator=generator)

    def accumulate(net: Any, failing: str) -> dict[str, torch.Tensor]:
        net.set_requires_all_reduce(False)
        net(first).sum().backward()
        # In the second pass: the forward pass, the backward pass before any reduction, or after one.
        Stumbling.stumbles = failing in ("outside", "inside")
        y = net(second)
        if Stumbling.stumbles:
            with pytest.raises(ArithmeticError, match="on purpose"):
                (Stumbling.apply(y) if failing == "outside" else y).sum().backward()
        Stumbling.stumbles = False
        if failing != "no reset":
            net.reset_iter_state()
        net.zero_grad()
        net(first).sum().backward()
        net.set_requires_all_reduce(True)
        net(second).sum().backward()
        return gradients_of(net)

    for failing in ("forward", "outside", "inside", "no reset"):
        stock = Layers()
        for module in (stock.first, stock.second, stock):
            fully_shard(module, mesh=mesh)
        net = shard(Layers(), mesh)
        hvdc.Compressor(net, "none", mesh=mesh, threshold=0)
        expected, got = accumulate(stock, failing), accumulate(net, failing)
        assert expected.keys() == got.keys()
        for name, one in expected.items():
            torch.testing.assert_close(got[name], one, msg=lambda text, f=failing: f"{f}: {text}")


@on_ranks(1, launcher="torchrun")
def test_offloaded_parameters_of_another_device() -> None:
    net = torch.nn.Linear(40, 30)
    fully_shard(net, mesh=mesh_of(1)["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    group = net._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    with (
        mock.patch.object(group, "device", torch.device("cuda", 0)),
        pytest.raises(ValueError, match="call fully_shard without CPUOffloadPolicy"),
    ):
        hvdc.Compressor(net, OneBit(), mesh=mesh_of(1), threshold=0)


@on_ranks(1, launcher="torchrun")
def test_gradients_of_earlier_backward_passes_are_kept_from_reuse() -> None:
    """On a device, these gradients may belong to another stream than the one that exchanges."""
    net = shard(Layers(), mesh_of(1))
    compressor = hvdc.Compressor(net, OneBit(), mesh=mesh_of(1), threshold=0)
    net.set_requires_all_reduce(False)
    net(torch.randn(3, 40)).sum().backward()
    partial, kept = [*compressor._partial.values()], []
    net.set_requires_all_reduce(True)
    with mock.patch.object(of_fsdp, "keep_from_reuse", lambda *tensors: kept.extend(tensors)):
        net(torch.randn(3, 40)).sum().backward()
    assert partial and {id(one) for one in partial} <= {id(one) for one in kept}
