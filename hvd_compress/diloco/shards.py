"""The ranks that share out the parameters of one worker."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hvd_compress.codecs.checks import check_choice
from hvd_compress.distributed.compressor import Compressor
from hvd_compress.engine.parameters import parameters
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.meshes import FLAT, Verdicts, one_mesh, replicas
from hvd_compress.process_group.values import problem_told, tell
from hvd_compress.ranks import agreement

_WRITE = "fully_shard(model, mesh=mesh['shard']) on the whole model last, and DiLoCo(model, ..., mesh=mesh)"


class Shards:
    """The ranks of a worker, each with its own shards of the parameters.

    Each rank exchanges its shards with the same ranks of the other workers.

    Args:
        model: the model.
        mesh: a mesh of two dimensions, workers first and shards second.

    Attributes:
        workers: the ranks with the same shards, one of each worker.
        group: the ranks of this worker.
        number: the number of this rank's shards, and the number of ranks that share the parameters out.
        verdicts: combines the ranks' findings on averages, after :meth:`begin`.

    Raises:
        TypeError, ValueError: the mesh does not fit the parameters, or cannot be carried.
    """

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        self._mesh = _shard_mesh(model)
        self.workers = replicas("DiLoCo", mesh, None, self._mesh)
        self.group = self._mesh.get_group()
        self.number = [self._mesh.get_local_rank(), self._mesh.size()]
        self.verdicts = Verdicts(None)

    def check(self, compressor: Compressor, group: dist.ProcessGroup | None) -> None:
        """Raises an error if a compressor was made for other ranks, or for an exchange that needs hosts."""
        ranks = dist.get_process_group_ranks(self.workers)
        if group is not None and dist.get_process_group_ranks(group) != ranks:
            raise ValueError(
                f"DiLoCo.mesh: expected a compressor without process_group=, or with that of the mesh's "
                f"first dimension, ranks {ranks}, got ranks {dist.get_process_group_ranks(group)}"
            )
        check_choice("DiLoCo", "exchange", compressor.exchange, FLAT)

    def group_of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The group that :meth:`DiLoCo.rebind` was given.

        Raises:
            TypeError, ValueError: it does not consist of ranks with the same shards.
        """
        if group is None:
            raise TypeError(
                "DiLoCo.rebind: expected the process group of the ranks with the same shards, got none"
            )
        return replicas("DiLoCo.rebind", None, group, self._mesh)

    def tell(self, value: Any) -> list[Any]:
        """Returns the value of each rank of the worker, JSON-serializable.

        Raises:
            ExchangeError: one of the ranks has told of an error.
        """
        return tell(collectives_of(self.group), value)

    def agree(self, content: dict[str, Any]) -> None:
        """Raises ``ExchangeError`` unless all ranks of the worker have the same content."""
        agreement.compare(self.tell(content))

    def begin(self, progress: dict[str, Any]) -> None:
        """Begins to combine averages, after the ranks of each shard have met.

        Args:
            progress: a value that has to be the same on all ranks of the worker by now.

        Raises:
            ExchangeError: it differs, or one of the ranks has told of an error.
        """
        self.agree(progress)
        ranks = collectives_of(self.group)
        # FSDP2's collectives have an order of their own.
        self.verdicts = Verdicts(ranks.among(range(ranks.size)))

    def problem_told(self) -> contextlib.AbstractContextManager[None]:
        """Makes the other ranks' :meth:`agree` raise an error if this block raises one."""
        return problem_told(self.group)


def _shard_mesh(model: nn.Module) -> DeviceMesh:
    """The mesh over which all of a model's parameters are sharded."""
    named = parameters(model, "DiLoCo.model")
    mesh = one_mesh("DiLoCo.model", named)
    if mesh is None:
        raise ValueError(
            f"DiLoCo.model: expected parameters that a mesh shares out, got a plain one for "
            f"{next(iter(named))}: call {_WRITE}"
        )
    partial = [n for n, one in named.items() if cast(DTensor, one).placements[0].is_partial()]
    if partial:
        raise ValueError(f"DiLoCo.model: expected no partial parameters, got {', '.join(partial)}")
    return mesh
