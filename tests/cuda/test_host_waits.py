"""The number of the host's waits for a GPU in a step, by PyTorch's own debug mode, on a rank by NCCL."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp
import hvd_compress.distributed
import hvd_compress.fsdp
from hvd_compress.codecs import ECQ, Codec, Int8, OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests import device
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    device.TYPE != "cuda", reason="needs an NVIDIA GPU, and HVDC_TEST_DEVICE=cuda"
)

WIDTH, LAYERS = 64, 6
EXCHANGES = ("allgather", "two_shot", "hierarchical")


def _waits(step: Callable[[], object]) -> Counter[str]:
    """The places in which the host waits in a step, after four others."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "called a synchronizing CUDA operation" in str(one.message)]
    return Counter(f"{one.filename}:{one.lineno}" for one in waits)


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device.TYPE)


def _backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(4, WIDTH, device=device.TYPE)).square().mean().backward()


@on_ranks(1, launcher="torchrun")
def test_ddp_does_not_wait() -> None:
    for exchange in EXCHANGES:
        for codec in (Int8(), OneBit(), ECQ()):
            ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.02)
            compressor = hvd_compress.ddp.Compressor(ddp, codec, threshold=1, exchange=exchange)
            ddp.register_comm_hook(compressor, hvd_compress.ddp.hook)
            waits = _waits(lambda ddp=ddp: _backward(ddp))
            assert not waits, (codec, exchange, waits)


@on_ranks(1, launcher="torchrun")
def test_all_reduce_does_not_wait() -> None:
    tensors = [torch.randn(WIDTH, WIDTH, device=device.TYPE) for _ in range(LAYERS)]
    names = [str(number) for number in range(LAYERS)]
    for codec, exchange in ((Int8(), "allgather"), (OneBit(), "two_shot")):
        for one_by_one in (False, True):
            waits = _waits(_all_reduce(tensors, names, codec, exchange, one_by_one))
            assert not waits, (codec, exchange, waits)


def _all_reduce(
    tensors: list[torch.Tensor], names: list[str], codec: Codec, exchange: str, one_by_one: bool
) -> Callable[[], None]:
    compressor = hvd_compress.distributed.Compressor(codec, exchange=exchange, threshold=1)
    reduce = hvd_compress.distributed.all_reduce

    def step() -> None:
        if one_by_one:
            works = [
                reduce(tensor, compressor, key=name, async_op=True)
                for tensor, name in zip(tensors, names, strict=True)
            ]
            for work in works:
                work.wait()
        else:
            reduce(tensors, compressor, key=names)

    return step


@on_ranks(1, launcher="torchrun")
def test_fsdp2_waits_once_a_backward_pass() -> None:
    mesh = init_device_mesh(device.TYPE, (1, 1), mesh_dim_names=("replicate", "shard"))
    for exchange in ("allgather", "two_shot"):
        model = _model()
        for layer in model:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        hvd_compress.fsdp.Compressor(model, OneBit(), mesh=mesh, threshold=1, exchange=exchange)
        waits = _waits(lambda model=model: _backward(model))
        assert waits.total() == 1, waits


@on_ranks(1, launcher="torchrun")
def test_onebit_adam_waits_once_a_step() -> None:
    """For the word that says whether any rank's gradients have an Inf."""
    model = _model()
    optimizer = OneBitAdam(model.named_parameters(), OneBit(), warmup_steps=2, lr=1e-4)

    def step() -> None:
        _backward(model)
        optimizer.step()

    waits = _waits(step)
    assert waits.total() == 1, waits


@on_ranks(1, launcher="torchrun")
def test_double_buffering_does_not_wait() -> None:
    model = _model()
    compressor = hvd_compress.distributed.Compressor(OneBit(), threshold=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    buffering = DoubleBuffering(model.named_parameters(), optimizer, compressor, enabled=True)
    x = torch.ones(4, WIDTH, device=device.TYPE)

    def step() -> None:
        for inputs, targets in buffering.parts(x, x):
            (model(inputs) - targets).square().mean().backward()
            buffering.step()

    waits = _waits(step)
    assert not waits, waits


@on_ranks(1, launcher="torchrun")
def test_diloco_waits_once_a_round() -> None:
    """For the words that say whether any rank has learnt an Inf, and what no rank has changed."""
    for delay in (0, 1):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        diloco = DiLoCo(model, Int8(), sync_every=2, delay=delay)

        def round_(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            diloco: DiLoCo = diloco,
        ) -> None:
            for _ in range(2):
                _backward(model)
                optimizer.step()
                diloco.step()

        waits = _waits(round_)
        assert waits.total() == 1, waits
