"""Trains on two ranks with compressors of all frontends for process groups, or without them."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as of_ddp
import hvd_compress.distributed as of_all_reduce
import hvd_compress.fsdp as of_fsdp
from hvd_compress import Int8
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from tests.fsdp.probes import mesh_of, shard


def _step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64))


def _main(use: bool) -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(_net())
    of_the_model = of_ddp.Compressor(ddp, Int8())
    if use:
        ddp.register_comm_hook(of_the_model, of_ddp.hook)
        # Made to be printed, or to read a state: another one exchanges the same gradients.
        beside = of_ddp.Compressor(ddp, Int8())
        print(beside.load_state_dict(of_the_model.state_dict()))
    _step(ddp)

    replicated = shard(_net(), mesh_of(2))
    of_replicas = of_fsdp.Compressor(replicated, Int8(), mesh=mesh_of(2))
    replicated[0].set_requires_all_reduce(use)
    _step(replicated)

    sharded = shard(_net(), mesh_of(1))
    of_shards = of_fsdp.CompressedReduceScatter(sharded, Int8())
    sharded[0].set_requires_gradient_sync(use)
    _step(sharded)

    adam = OneBitAdam((local := _net()).named_parameters(), Int8(), warmup_steps=1)
    _step(local, adam if use else None)
    diloco = DiLoCo(local := _net(), Int8(), sync_every=2)
    for _ in range(2):
        _step(local)
        if use:
            diloco.step()

    of_tensors = of_all_reduce.Compressor(Int8())
    _step(local := _net())
    if use:
        of_all_reduce.all_reduce([p.grad for p in local.parameters()], of_tensors)
    later = shard(_net(), mesh_of(1))
    beside = of_fsdp.CompressedReduceScatter(later, Int8())
    dist.destroy_process_group()  # Training may go on alone.
    torch.optim.SGD(later.parameters(), lr=0.1).step()
    print("trained", len([of_the_model, of_replicas, of_shards, of_tensors, beside]))


_main(sys.argv[1] == "used")
