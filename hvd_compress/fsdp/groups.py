"""The ranks that hold the same shard."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_compress.ranks.errors import ExchangeError


def replicas(mesh: Any, group: Any, shard_mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of the ranks with this rank's shards.

    Args:
        mesh: a mesh of two dimensions, replicas first and shards second; or None.
        group: the process group itself; or None.
        shard_mesh: the mesh over which the model is sharded.

    Raises:
        TypeError, ValueError: not exactly one of the two was passed, or it does not fit the model's mesh.
        ExchangeError: this rank is not in the group.
    """
    if (mesh is None) == (group is None):
        got = "neither" if mesh is None else "both"
        raise TypeError(
            f"Compressor: expected mesh=, of two dimensions (replicate, shard), or process_group=, the "
            f"ranks with the same shard, got {got}"
        )
    shards = shard_mesh.mesh.tolist()
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"Compressor.mesh: expected a DeviceMesh, got {type(mesh).__name__}")
        if mesh.ndim != 2:
            raise ValueError(
                f"Compressor.mesh: expected two dimensions, replicas first and shards second, got "
                f"{mesh.ndim}"
            )
        rows = [row for row in mesh.mesh.tolist() if dist.get_rank() in row]
        if rows != [shards]:
            raise ValueError(
                f"Compressor.mesh: expected the ranks {shards} that the model is sharded over along the "
                f"second dimension, got {rows[0] if rows else 'a mesh without this rank'}"
            )
        return mesh.get_group(0)
    if dist.get_rank(group) < 0:
        raise ExchangeError("expected a process group with this rank in it, got one without")
    ranks = dist.get_process_group_ranks(group)
    shared = sorted(set(ranks) & set(shards))
    if shared != [dist.get_rank()]:
        raise ValueError(
            f"Compressor.process_group: expected ranks with the same shard of the model, which is sharded "
            f"over ranks {shards}, got {ranks}"
        )
    return group
