"""Training on a device that is not a GPU's, by the code for CUDA devices, beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as of_ddp
import hvd_compress.distributed as of_all_reduce
import hvd_compress.fsdp as of_fsdp
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.process_group.device_collectives import InStream, ThroughHost, collectives_of
from tests.contract import residuals, results
from tests.contract.ddp import DDP
from tests.contract.distributed import Distributed
from tests.cuda.executors import emulated_library
from tests.hostdev import hostdev
from tests.ranks import on_ranks

DEVICE = {"HVDC_TEST_DEVICE": hostdev.TYPE}
CPU = torch.device("cpu")
Step = Callable[[], None]


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the device before the ranks start, which would build it at the same time."""
    emulated_library()
    hostdev.library()


def _model(device: torch.device) -> torch.nn.Module:
    with CPU:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 30)
        )
    return model.to(device)


def _descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _ddp(device: torch.device, **options: Any) -> tuple[torch.nn.Module, Step]:
    ddp = DistributedDataParallel(_model(device), bucket_cap_mb=0.001, **options)
    ddp.register_comm_hook(of_ddp.Compressor(ddp, OneBit(), threshold=0), of_ddp.hook)
    return ddp, _descent(ddp).step


def _ddp_through_the_host(device: torch.device) -> tuple[torch.nn.Module, Step]:
    return _ddp(device, process_group=_gloo())


def _ddp_in_two_shots_of_views(device: torch.device) -> tuple[torch.nn.Module, Step]:
    ddp = DistributedDataParallel(_model(device), gradient_as_bucket_view=True)
    compressor = of_ddp.Compressor(ddp, Int8(), exchange="two_shot", threshold=0)
    ddp.register_comm_hook(compressor, of_ddp.hook)
    return ddp, _descent(ddp).step


def _all_reduce(device: torch.device) -> tuple[torch.nn.Module, Step]:
    model = _model(device)
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0)
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


def _fsdp_of_replicas(device: torch.device) -> tuple[torch.nn.Module, Step]:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_model(device), mesh=mesh["shard"])
    of_fsdp.Compressor(model, OneBit(), mesh=mesh, threshold=0)
    return model, _descent(model).step


def _fsdp_of_shards(device: torch.device) -> tuple[torch.nn.Module, Step]:
    model = _model(device)
    mesh = init_device_mesh(device.type, (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    of_fsdp.CompressedReduceScatter(model, Int8())
    of_fsdp.CompressedAllGather(model, Int8())
    return model, _descent(model).step


def _onebit_adam(device: torch.device) -> tuple[torch.nn.Module, Step]:
    model = _model(device)
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0, warmup_steps=2)
    return model, OneBitAdam(model.named_parameters(), compressor, lr=0.01).step


def _diloco(device: torch.device) -> tuple[torch.nn.Module, Step]:
    model = _model(device)
    compressor = of_all_reduce.Compressor(Int8(), threshold=0)
    diloco, optimizer = DiLoCo(model, compressor, sync_every=2), _descent(model)

    def step() -> None:
        optimizer.step()
        diloco.step()

    return model, step


@cache
def _gloo() -> dist.ProcessGroup:
    return dist.new_group(backend=f"cpu:gloo,{hostdev.TYPE}:gloo")


def _trained(
    make: Callable[[torch.device], tuple[torch.nn.Module, Step]], device: torch.device
) -> list[torch.Tensor]:
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


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_every_frontend_beside_the_cpu() -> None:
    """The parameters are the same, bit for bit."""
    device = torch.device(hostdev.TYPE, 0)
    makes = (_ddp, _ddp_through_the_host, _ddp_in_two_shots_of_views, _all_reduce)
    makes += (_fsdp_of_replicas, _fsdp_of_shards, _onebit_adam, _diloco)
    for make in makes:
        pairs = zip(_trained(make, device), _trained(make, CPU), strict=True)
        assert all(torch.equal(got, expected) for got, expected in pairs), make.__name__


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_how_the_groups_send() -> None:
    """A group whose backend takes tensors of the device sends in streams, and Gloo through the host."""
    device = torch.device(hostdev.TYPE, 0)
    assert type(collectives_of(None, device)) is InStream
    assert type(collectives_of(_gloo(), device)) is ThroughHost


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_ddp_as_every_frontend() -> None:
    results.every_form(DDP(), "allgather")
    results.every_codec(DDP(), "two_shot")
    results.parameters_that_are_not_used(DDP(), "two_shot")
    residuals.nonfinite_gradients(DDP(), "allgather")


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_all_reduce_as_every_frontend() -> None:
    results.every_form(Distributed(), "two_shot")
    results.every_codec(Distributed(), "allgather")
    residuals.nonfinite_gradients(Distributed(), "two_shot")
