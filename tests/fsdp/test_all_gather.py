"""Encoded gathers of parameters on real ranks: every rank has the reference's copy of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import BF16, ECQ, Codec, Int8, OneBit, Ternary
from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.encoded import EncodedCollectives
from tests.contract.cases import FULL
from tests.cuda.executors import emulated_library, late_kernels
from tests.fsdp.probes import (
    SHAPES,
    Net,
    assert_replicas_are_alike,
    backward,
    make,
    mesh_of,
    of_today,
    shard,
)
from tests.papers.reference import sent
from tests.ranks import on_ranks
from tests.torch_models import DEVICE, assert_same_bits, targets

Seen = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def built() -> None:
    """Before the ranks start, which would build it at the same time."""
    emulated_library()


def _change(net: Any, step: int, scale: float) -> None:
    """Changes the exact shards, on each rank in another way."""
    generator = torch.Generator(DEVICE).manual_seed(1000 * dist.get_rank() + step)
    with torch.no_grad():
        for parameter in net.parameters():
            own = parameter.to_local()
            own.add_(scale * torch.randn(own.shape, generator=generator, device=DEVICE))


def _net(**options: Any) -> Any:
    """A model that all ranks share out, with numbers in it."""
    net = shard(Net(SHAPES), mesh_of(1), **options)
    _change(net, 0, 1.0)
    return net


def _seen(net: Any, run: Callable[[], object]) -> Seen:
    """The parameters of which a forward pass makes use."""
    seen: Seen = {}

    def look(name: str, module: torch.nn.Module) -> None:
        own = module.named_parameters(recurse=False)
        seen.update({f"{name}.{n}": p.detach().clone().float() for n, p in own})

    hooks = [
        module.register_forward_pre_hook(lambda module, _, name=name: look(name, module))
        for name, module in net.named_children()
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def _step(net: Any, step: int = 0) -> Seen:
    return _seen(net, lambda: backward(net, targets(SHAPES, dist.get_rank(), step)))


def _exact(net: Any, dtype: torch.dtype = torch.float32) -> Seen:
    net.reshard()
    named = net.named_parameters()
    return {name: _whole(one).to(dtype).float() for name, one in named}


@torch.no_grad()
def _whole(parameter: Any) -> torch.Tensor:
    """All ranks' shards; DTensor's own gather crashes if ranks of Gloo share a GPU."""
    rows, own = -(-parameter.shape[0] // dist.get_world_size()), parameter.to_local()
    padded = own.new_zeros((rows, *parameter.shape[1:]))
    padded[: own.shape[0]] = own
    shards = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, padded)
    return torch.cat(shards)[: parameter.shape[0]]


def _message_bytes(codec: Codec) -> int:
    """Returns what a rank sends after a step in which its shards have changed."""
    return sum(codec.payload_bytes((count,)) for count in _shard_elements().values())


def _shard_elements() -> dict[str, int]:
    size, counts = dist.get_world_size(), {"first": 0, "second": 0}
    for name, shape in SHAPES.items():
        counts[name.split(".")[0]] += -(-shape[0] // size) * math.prod(shape[1:])
    return counts


class _Copies:
    """The reference of the copies that all ranks hold.

    Args:
        codec: the codec of differences.
        dtype: the dtype in which parameters are gathered.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype = torch.float32) -> None:
        self._codec, self._dtype = codec, dtype
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._gathers = 0

    def step(self, exact: Seen) -> Seen:
        """Returns the parameters that forward passes must see, from the exact ones."""
        size = dist.get_world_size()
        result: Seen = {}
        for module in ("first", "second"):
            self._gathers += 1
            names = [name for name in SHAPES if name.startswith(module)]
            rows = [
                torch.cat([self._part(exact[name], rank).flatten() for name in names])
                for rank in range(size)
            ]
            copies = self._copies.setdefault(module, [row.clone() for row in rows])
            for rank, (row, copy) in enumerate(zip(rows, copies, strict=True)):
                change = sent(self._codec, row - copy, rank, 0, self._gathers, 3)
                copy.copy_((copy + change).to(self._dtype).float())
            for name in names:
                parts = []
                for rank, copy in enumerate(copies):
                    part = self._part(exact[name], rank)
                    begin = sum(self._part(exact[n], 0).numel() for n in names[: names.index(name)])
                    parts.append(copy[begin : begin + part.numel()].view(part.shape))
                result[name] = torch.cat(parts)[: exact[name].shape[0]]
        self._gathers += 2  # The empty ones of the backward pass.
        return result

    def _part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        size = dist.get_world_size()
        rows = -(-whole.shape[0] // size)
        padded = whole.new_zeros((rows * size, *whole.shape[1:]))
        padded[: whole.shape[0]] = whole
        return padded.chunk(size)[rank]


def _as_the_reference() -> None:
    for codec in (Int8(), Int8("linear", "tensor"), OneBit(), BF16(), ECQ(15, "linf", 64)):
        net = _net()
        gather = hvdc.CompressedAllGather(net, codec, seed=3)
        beside = _Copies(codec)
        for step in range(4):
            _change(net, step + 1, 0.01)
            gather.reset_counters()
            exact = _exact(net)
            got = _step(net)
            assert_same_bits(got, beside.step(exact))
            if step == 0:
                assert_same_bits(got, exact)  # As without compression.
                continue
            counters = gather.counters
            assert counters.steps == 4 and counters.message_bytes == _message_bytes(codec)
            assert counters.uncompressed_bytes == 8 * sum(_shard_elements().values())


@on_ranks(2, launcher="torchrun")
def test_every_codec_between_two_ranks() -> None:
    _as_the_reference()


@on_ranks(4, launcher="torchrun")
def test_every_codec_between_four_ranks() -> None:
    _as_the_reference()


@on_ranks(2, launcher="torchrun")
def test_mixed_precision() -> None:
    net = _net(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    hvdc.CompressedAllGather(net, Int8(), seed=3)
    beside = _Copies(Int8(), torch.bfloat16)
    for step in range(3):
        _change(net, step + 1, 0.01)
        exact = _exact(net, torch.bfloat16)
        assert_same_bits(_step(net), beside.step(exact))


@on_ranks(2, launcher="torchrun")
def test_what_has_not_changed_is_not_sent() -> None:
    """In accumulation, evaluation and inference; nor does it matter in which of them it was sent."""
    rank = dist.get_rank()
    net = _net()
    gather = hvdc.CompressedAllGather(net, Int8())
    _step(net)
    _change(net, 1, 0.01)
    with torch.inference_mode():
        known = _seen(net, lambda: net(targets(SHAPES, rank, 0)))
    sent_before = gather.counters.message_bytes
    for passes in (torch.no_grad, torch.inference_mode):
        with passes():
            assert_same_bits(_seen(net, lambda: net(targets(SHAPES, rank, 0))), known)
    net.set_requires_gradient_sync(False)
    assert_same_bits(_step(net), known)
    net.set_requires_gradient_sync(True)
    assert_same_bits(_step(net), known)
    assert gather.counters.message_bytes == sent_before


@on_ranks(2, launcher="torchrun")
def test_training_after_a_first_gather_in_inference_mode() -> None:
    """FSDP2 trains if its own first gather was outside of that mode, with encoded gathers, too."""
    rank = dist.get_rank()
    net = _net()
    with torch.no_grad():
        net(targets(SHAPES, rank, 0))
    hvdc.CompressedAllGather(net, BF16())
    with torch.inference_mode():
        net(targets(SHAPES, rank, 0))
    for step in range(2):
        _change(net, step + 1, 0.01)
        exact = _exact(net)
        for name, one in _step(net).items():
            torch.testing.assert_close(one, exact[name], atol=1e-3, rtol=0)


@on_ranks(4, launcher="torchrun")
def test_a_change_on_one_rank_alone() -> None:
    net = _net()
    gather = hvdc.CompressedAllGather(net, Int8())
    _step(net)
    before, sent_before = _exact(net), gather.counters.message_bytes
    if dist.get_rank() == 2:
        with torch.no_grad():
            net.first.a.to_local()[3, 5] += 0.25
    got = _step(net)
    changed = {name: int((one != before[name]).sum()) for name, one in got.items()}
    assert changed == {"first.a": 1, "first.b": 0, "second.c": 0, "second.tiny": 0}
    only_first = Int8().payload_bytes((_shard_elements()["first"],))
    assert gather.counters.message_bytes == sent_before + only_first


@on_ranks(2, launcher="torchrun")
def test_parameters_that_were_changed_by_hand() -> None:
    """Large changes come exactly; so do an Inf and a NaN, and what follows them."""
    net = _net()
    hvdc.CompressedAllGather(net, Int8())
    for step, value in enumerate((None, 7.0, math.nan, 1.0, math.inf, 2.0)):
        with torch.no_grad():
            if value is None:
                _change(net, 9, 3.0)
            elif dist.get_rank() == 1:
                net.first.b.to_local()[4:9] = value
                net.second.c.to_local().mul_(-1)
        exact = _exact(net)
        got = _step(net, step)
        for name, one in exact.items():
            if value == 7.0 and name == "first.b":  # Small beside the rest of the module.
                torch.testing.assert_close(got[name], one, atol=0.1, rtol=0)
            elif value != 7.0 or name.startswith("second"):
                torch.testing.assert_close(got[name], one, atol=0, rtol=0, equal_nan=True)


@on_ranks(2, launcher="torchrun")
def test_training_goes_on_from_a_checkpoint() -> None:
    """To the loss of FSDP2 alone."""

    def train(codec: Codec | None, steps: int, state: Any = None) -> tuple[Any, list[float]]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
        target = torch.nn.Linear(48, 48)
        shard(net, mesh_of(1))
        if state is not None:
            for parameter, saved in zip(net.parameters(), state[0], strict=True):
                parameter.data.copy_(saved)
        if codec is not None:
            hvdc.CompressedAllGather(net, codec)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
        if state is not None:
            optimizer.load_state_dict(state[1])
        generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        losses = []
        for _ in range(steps):
            x = torch.randn(32, 48, generator=generator)
            loss = mse_loss(net(x).tanh(), target(x).detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        net.reshard()
        return ([one.detach().clone() for one in net.parameters()], optimizer.state_dict()), losses

    _, stock = train(None, 60)
    state, half = train(Int8(), 30)
    _, rest = train(Int8(), 30, state)
    # The second half sees the same batches again.
    _, beside = train(None, 30, train(None, 30)[0])
    assert half[-1] < 0.7 * half[0] and rest[-1] < rest[0]
    for got, want in (*zip(half, stock, strict=False), *zip(rest, beside, strict=True)):
        assert abs(got - want) < 0.01 * want


@on_ranks(4, launcher="torchrun")
def test_beside_compressors_of_gradients() -> None:
    mesh = mesh_of(2)
    net, _ = make(mesh, OneBit(), FULL)
    hvdc.CompressedReduceScatter(net, Int8())
    gather = hvdc.CompressedAllGather(net, Int8())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for step in range(4):
        backward(net, targets(SHAPES, dist.get_rank(), step))
        optimizer.step()
        assert_replicas_are_alike(mesh, net)
    seen = _step(net)
    assert gather.counters.steps == 20
    for name, one in seen.items():
        everywhere = [torch.empty_like(one) for _ in range(4)]
        dist.all_gather(everywhere, one)
        assert all(torch.equal(one, other) for other in everywhere), name


@on_ranks(4, launcher="torchrun")
def test_shards_of_another_size_after_the_forward_pass() -> None:
    """FSDP2 gathers what was gathered before, among fewer ranks."""
    results = []
    for compressed in (False, True):
        net = Net(SHAPES)
        mesh = init_device_mesh(DEVICE.type, (4,))
        for module in (*net.children(), net):
            fully_shard(module, mesh=mesh, reshard_after_forward=2)
        _change(net, 0, 1.0)
        if compressed:
            gather = hvdc.CompressedAllGather(net, Int8())
        got = [backward(net, targets(SHAPES, dist.get_rank(), step)) for step in range(2)]
        results.append(got)
    assert gather.counters.steps == 4
    for want, other in zip(*results, strict=True):
        assert_same_bits(want, other)


def _of_two_dtypes(dtype: torch.dtype, *, ignores: bool = False, **options: Any) -> Any:
    """A layer of two dtypes, with trainable parameters in float32 and a frozen one."""
    layer = torch.nn.Linear(8, 8)
    layer.frozen = torch.nn.Parameter(torch.ones(8, 8).to(dtype), requires_grad=False)
    ignored = {layer.frozen} if ignores else None
    return fully_shard(layer, mesh=mesh_of(1)["shard"], ignored_params=ignored, **options)


@on_ranks(2, launcher="torchrun")
def test_parameters_of_several_dtypes() -> None:
    """The message names the dtypes, and what makes them one works."""
    for dtype, name in ((torch.uint8, "uint8"), (torch.bfloat16, "bfloat16")):
        message = (
            rf"the model: expected .* in one dtype, got some of .*torch\.{name}.*ignored_params="
        )
        with pytest.raises(TypeError, match=message):
            hvdc.CompressedAllGather(_of_two_dtypes(dtype), Int8())
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"got some of torch\.bfloat16, torch\.uint8"):
        hvdc.CompressedAllGather(_of_two_dtypes(torch.uint8, mp_policy=cast), Int8())
    for layer in (
        _of_two_dtypes(torch.uint8, ignores=True),
        _of_two_dtypes(torch.bfloat16, mp_policy=cast),
    ):
        hvdc.CompressedAllGather(layer, Int8())
        assert layer(torch.ones(1, 8)).isfinite().all()


@on_ranks(2, launcher="torchrun")
def test_what_it_is_not_for() -> None:
    good, double = _net(), shard(Net(SHAPES, torch.float64), mesh_of(1))
    hooked = _net()
    hooked.second.set_custom_all_gather(mock.Mock())
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (
            Net(SHAPES),
            Int8(),
            {},
            TypeError,
            r"CompressedAllGather.model: .*got Net, which has none",
        ),
        (hooked, Int8(), {}, ValueError, "second: expected .* own all-gather, got one with Mock"),
        (good, 8, {}, TypeError, "codec: expected a codec"),
        (good, ECQ(7, "linf", 64, coding="entropy"), {}, ValueError, "fixed length, got ECQ"),
        (
            good,
            Ternary("tensor"),
            {},
            ValueError,
            "first, shape .*: ErrorFeedback: expected alpha <",
        ),
        (good, Int8(), {"seed": -1}, ValueError, r"seed: expected an integer in \[0, 2"),
        (good, Int8(), {"threads": 0}, ValueError, r"threads: expected an integer in \[1, 1024"),
        (
            double,
            Int8(),
            {},
            TypeError,
            "first: expected parameters of float32, .* set param_dtype",
        ),
    ]
    for model, codec, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            hvdc.CompressedAllGather(model, codec, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "set_custom_all_gather")
        with pytest.raises(NotImplementedError, match=r"expected FSDP2 as in PyTorch 2\.11 to"):
            hvdc.CompressedAllGather(good, Int8())
    hvdc.CompressedAllGather(good, Int8())
    with pytest.raises(ValueError, match=r"first: expected .* own all-gather, got one with"):
        hvdc.CompressedAllGather(good, Int8())


@on_ranks(2, launcher="torchrun")
def test_ranks_that_disagree() -> None:
    rank, net = dist.get_rank(), _net()
    with pytest.raises(hvdc.ExchangeError, match="codec group: 64 on rank 0, 128 on rank 1"):
        hvdc.CompressedAllGather(net, Int8(group=64 * (rank + 1)))
    if rank == 1:
        with pytest.raises(ValueError, match="threads: expected an integer"):
            hvdc.CompressedAllGather(net, Int8(), threads=0)
    else:
        with pytest.raises(hvdc.ExchangeError, match=r"ValueError: .*threads.* on rank 1"):
            hvdc.CompressedAllGather(net, Int8())
    hvdc.CompressedAllGather(net, Int8())
    with pytest.raises(
        hvdc.ExchangeError, match=r"same gather on all ranks, got .* module 0 .* 1 on"
    ):
        (net.first, net.second)[rank].unshard()


@of_today
@on_ranks(2, launcher="torchrun")
def test_a_rank_that_fails() -> None:
    """An error on every rank, at the latest in the next gather; after it, all is as it should be."""
    rank = dist.get_rank()
    encode, start = EncodedCollectives._encode, Collectives.start

    def failing(self: Any, codec: Codec, parts: Any, message: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    def altering(self: Any, collective: Collective) -> Any:
        work = start(self, collective)
        if collective.kind == "all_gather" and collective.message.numel() > 1000:
            work[1].wait()
            work[0][0, 40] ^= 16
        return work

    fails = hvdc.ExchangeError, "expected a gather of all ranks, but rank 1 has failed"
    altered = hvdc.PayloadError, "parameters of first: rank 0's payload"
    for kernels in (nullcontext, late_kernels):
        with kernels():
            net = _net()
            hvdc.CompressedAllGather(net, Int8())
            _step(net)
            for owner, name, instead, own in (
                (EncodedCollectives, "_encode", failing, (ArithmeticError, "on purpose")),
                (Collectives, "start", altering, altered),
            ):
                _change(net, 1, 0.01)
                chosen = instead if rank == 1 else {"_encode": encode, "start": start}[name]
                kind, message = own if rank == 1 else fails
                with mock.patch.object(owner, name, chosen), pytest.raises(kind, match=message):
                    _step(net)
                net.reset_iter_state()
                net.reshard()
                _change(net, 2, 0.01)
                got, exact = _step(net), _exact(net)
                for name, one in got.items():
                    torch.testing.assert_close(one, exact[name], atol=0.01, rtol=0)
