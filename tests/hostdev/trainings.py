"""Trainings of a small model by every frontend, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as of_ddp
import hvd_compress.distributed as of_all_reduce
import hvd_compress.fsdp as of_fsdp
from hvd_compress.codecs import Codec, Int8, OneBit, PowerSGD
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests.hostdev import hostdev

CPU = torch.device("cpu")
Made = tuple[torch.nn.Module, Callable[[], None]]
"""A model, and what follows its backward pass."""
Make = Callable[[torch.device], Made]


def _model(device: torch.device) -> torch.nn.Module:
    with CPU:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 30)
        )
    return model.to(device)


def _descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stock_ddp(device: torch.device) -> Made:
    model = DistributedDataParallel(_model(device), bucket_cap_mb=0.001)
    return model, _descent(model).step


def ddp(
    device: torch.device,
    codec: Codec = OneBit(),  # noqa: B008
    exchange: str = "allgather",
    **options: Any,
) -> Made:
    model = DistributedDataParallel(_model(device), **{"bucket_cap_mb": 0.001, **options})
    compressor = of_ddp.Compressor(model, codec, exchange=exchange, threshold=0)
    model.register_comm_hook(compressor, of_ddp.hook)
    return model, _descent(model).step


def ddp_through_the_host(device: torch.device) -> Made:
    return ddp(device, process_group=gloo())


def ddp_in_two_shots_of_views(device: torch.device) -> Made:
    return ddp(device, Int8(), "two_shot", bucket_cap_mb=25, gradient_as_bucket_view=True)


def ddp_in_two_shots(device: torch.device) -> Made:
    return ddp(device, exchange="two_shot")


def ddp_of_factors(device: torch.device) -> Made:
    return ddp(device, PowerSGD(2), "low_rank")


def all_reduce(device: torch.device, exchange: str = "allgather") -> Made:
    model = _model(device)
    compressor = of_all_reduce.Compressor(OneBit(), exchange=exchange, threshold=0)
    optimizer = _descent(model)

    def step() -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        works = [
            of_all_reduce.all_reduce(one, compressor, key=str(number), async_op=True)
            for number, one in enumerate(gradients)
        ]
        for work in works:
            work.wait()
        optimizer.step()

    return model, step


def all_reduce_in_two_shots(device: torch.device) -> Made:
    return all_reduce(device, "two_shot")


def stock_fsdp(device: torch.device) -> Made:
    model = _model(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh(device.type, (2,)))
    return model, _descent(model).step


def fsdp_of_replicas(device: torch.device) -> Made:
    """Two replicas, each of half of the ranks."""
    shards = dist.get_world_size() // 2
    mesh = init_device_mesh(device.type, (2, shards), mesh_dim_names=("replicate", "shard"))
    model = _model(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    of_fsdp.Compressor(model, OneBit(), mesh=mesh, threshold=0)
    return model, _descent(model).step


def fsdp_that_accumulates(device: torch.device) -> Made:
    model, finish = fsdp_of_replicas(device)
    model.set_requires_all_reduce(False)
    passes = itertools.count(1)

    def step() -> None:
        exchanged = next(passes) % 2 == 0
        if exchanged:
            finish()
        model.set_requires_all_reduce(not exchanged)

    return model, step


def fsdp_of_shards(device: torch.device) -> Made:
    model = _model(device)
    mesh = init_device_mesh(device.type, (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    of_fsdp.CompressedReduceScatter(model, Int8())
    of_fsdp.CompressedAllGather(model, Int8())
    return model, _descent(model).step


def onebit_adam(device: torch.device) -> Made:
    model = _model(device)
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0, warmup_steps=2)
    return model, OneBitAdam(model.named_parameters(), compressor, lr=0.01).step


def double_buffering(device: torch.device) -> Made:
    model = _model(device)
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0)
    return model, DoubleBuffering(model, _descent(model), compressor, enabled=True).step


def diloco(device: torch.device, **options: Any) -> Made:
    model = _model(device)
    compressor = of_all_reduce.Compressor(Int8(), threshold=0)
    outer, optimizer = DiLoCo(model, compressor, sync_every=2, **options), _descent(model)

    def step() -> None:
        optimizer.step()
        outer.step()

    return model, step


def diloco_of_fragments_on_their_way(device: torch.device) -> Made:
    return diloco(device, fragments=2, delay=1)


@cache
def gloo() -> dist.ProcessGroup:
    return dist.new_group(backend=f"cpu:gloo,{hostdev.TYPE}:gloo")


def trained(make: Make, device: torch.device) -> list[torch.Tensor]:
    """This rank's parameters after five steps, in host memory."""
    model, step = make(device)
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    for _ in range(5):
        model.zero_grad()
        batch = torch.randn(8, 40, generator=generator, dtype=torch.float32, device="cpu")
        model(batch.to(device)).square().mean().backward()
        step()
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return [one.detach().cpu() for one in own]


STOCK: tuple[Make, ...] = (stock_ddp, stock_fsdp)
"""PyTorch alone."""
OURS: tuple[Make, ...] = (
    ddp,
    ddp_through_the_host,
    ddp_in_two_shots,
    ddp_in_two_shots_of_views,
    ddp_of_factors,
    all_reduce,
    all_reduce_in_two_shots,
    fsdp_of_replicas,
    fsdp_that_accumulates,
    fsdp_of_shards,
    onebit_adam,
    double_buffering,
    diloco,
    diloco_of_fragments_on_their_way,
)
