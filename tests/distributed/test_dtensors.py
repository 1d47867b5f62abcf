"""Tensors that a device mesh shares out, of which ranks with the same part average their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hvd_compress.distributed as hvdc
from hvd_compress import Int8
from tests.ranks import on_ranks
from tests.torch_models import targets

SHAPES = {"cut": (7, 300), "whole": (40, 50)}


def _whole(step: int) -> dict[str, torch.Tensor]:
    return targets(SHAPES, dist.get_rank() // 2, step)  # The same for all shards of a replica.


@on_ranks(4, launcher="torchrun")
def test_parts_are_averaged_over_the_ranks_with_the_same_part() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compressors = [
        hvdc.Compressor(Int8(), process_group=mesh.get_group("replicate"), threshold=0)
        for _ in range(2)
    ]
    for step in range(3):
        given, cuts = _whole(step), {"cut": [Shard(0)], "whole": [Replicate()]}
        tensors = {n: distribute_tensor(one, mesh["shard"], cuts[n]) for n, one in given.items()}
        parts = {name: tensor.to_local().clone() for name, tensor in tensors.items()}
        for compressor, one in zip(compressors, (tensors, parts), strict=True):
            hvdc.all_reduce(list(one.values()), compressor, key=list(one))
        for name, tensor in tensors.items():
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.to_local(), parts[name])
    # A tensor on the whole mesh, replicated on one dimension of it.
    both = distribute_tensor(_whole(9)["cut"], mesh, [Replicate(), Shard(0)])
    part = both.to_local().clone()
    hvdc.all_reduce(both, compressors[0], key="both")
    hvdc.all_reduce(part, compressors[1], key="both")
    assert torch.equal(both.to_local(), part)


@on_ranks(4, launcher="torchrun")
def test_what_has_other_parts_on_other_ranks_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas, whole = torch.zeros(8, 200), mesh.get_group("replicate")
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (mesh["shard"], [Partial()], whole, TypeError, "redistribute"),
        (mesh, [Shard(0), Shard(1)], whole, ValueError, "on at most one dimension of its mesh"),
        (mesh["shard"], [Shard(0)], None, ValueError, "of which .* have other parts"),
        (mesh["replicate"], [Shard(0)], whole, ValueError, "of which .* have other parts"),
    ]
    for its_mesh, placements, group, kind, match in cases:
        compressor = hvdc.Compressor(Int8(), process_group=group)
        tensor = DTensor.from_local(replicas, its_mesh, placements)
        with pytest.raises(kind, match=match):
            hvdc.all_reduce(tensor, compressor)
    # Each rank's tensor is fine by itself, but they are not parts of the same place.
    other = init_device_mesh("cpu", (4,))
    compressor = hvdc.Compressor(Int8(), process_group=whole)
    tensor = DTensor.from_local(replicas, other, [Replicate()])
    tensor = (
        DTensor.from_local(replicas, mesh["shard"], [Shard(0)]) if dist.get_rank() < 2 else tensor
    )
    with pytest.raises(hvdc.ExchangeError, match="part of tensor: "):
        hvdc.all_reduce(tensor, compressor)
