"""Jobs of FSDP2 on two replicas of two shards."""

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
    """The mesh of all ranks, whose groups get the timeout of the ranks instead of PyTorch's default."""
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
    """The reference for this rank's shards, as arrays.

    Args:
        beside: the reference with tensors.
    """

    def __init__(self, beside: probes.Beside) -> None:
        self._beside = beside

    def average(self, everybodys: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The expected averages of this rank's shards of the ranks' gradients."""
        shards = self._beside.average([as_tensors(one) for one in everybodys])
        return {name: shard.numpy() for name, shard in shards.items()}


class FSDP(ProcessGroupFrontend):
    """The frontend ``hvd_compress.fsdp``."""

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
