"""FSDP2: two replicas of two shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.reference import Simulation
from tests.contract.frontend import Arrays, Job
from tests.contract.process_groups import ProcessGroupFrontend
from tests.contract.pytorch import TorchJob
from tests.fsdp import probes
from tests.torch_models import as_tensors

REPLICAS = 2


def mesh() -> DeviceMesh:
    """All ranks. Groups of a mesh have PyTorch's default timeout, and not that of the ranks."""
    made = probes.mesh_of(REPLICAS)
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    for dimension in range(made.ndim):
        dist.distributed_c10d._set_pg_timeout(timeout, made.get_group(dimension))
    return made


class _Job(TorchJob):
    model: Any

    def step(self, gradients: Arrays, used: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        assert used is None
        shards = probes.backward(
            self.model, {name: torch.from_numpy(g) for name, g in gradients.items()}
        )
        return {name: shard.numpy() for name, shard in shards.items()}


class _OfShards:
    """The reference of this rank's shards.

    Args:
        beside: the same for tensors.
    """

    def __init__(self, beside: probes.Beside) -> None:
        self._beside = beside

    def average(self, everybodys: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What this rank's shards of the ranks' gradients must become."""
        shards = self._beside.average([as_tensors(one) for one in everybodys])
        return {name: shard.numpy() for name, shard in shards.items()}


class FSDP(ProcessGroupFrontend):
    """How ranks make jobs of ``hvd_compress.fsdp``."""

    name = "fsdp"
    forms = ()
    shapes = probes.SHAPES

    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Any,
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        net, compressor = probes.make(
            mesh(), codec, feedback, shapes=shapes, exchange=exchange, **options
        )
        return _Job(net, compressor, getattr(torch, dtype))

    def simulation(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, tuple[int, ...]],
        **options: Any,
    ) -> Simulation:
        assert options.pop("size") == dist.get_world_size()
        beside = probes.Beside(mesh(), exchange, codec, feedback, shapes=shapes, **options)
        return _OfShards(beside)  # type: ignore[return-value]
