"""Training with PyTorch's FSDP2: replicas whose parameters several ranks share out (HSDP)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hvd_compress.fsdp as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, STOCK, Compression
from benchmarks.settings import Settings
from benchmarks.trainers import distributed
from benchmarks.trainers.torch import TorchTrainer
from hvd_compress.codecs import codec_from_config
from hvd_compress.ranks.counters import Counters


class FSDPSession(distributed.DistributedSession):
    """Implements :class:`benchmarks.loop.Session`.

    The settings ``reduce_scatter=int8`` and ``all_gather=int8`` encode the messages within a
    replica, too; bytes and times are then those of these exchanges.
    """

    _within: Sequence[hvdc.CompressedReduceScatter | hvdc.CompressedAllGather] = ()

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        ranks, shards = dist.get_world_size(), settings.shards
        if ranks % shards:
            raise ValueError(
                f"expected ranks that are replicas times shards, got {ranks} ranks and --shards {shards}"
            )
        mesh = init_device_mesh(
            settings.device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        stock = compression.name == STOCK
        chosen = {
            kind: options.pop(name)
            for name, kind in (
                ("reduce_scatter", hvdc.CompressedReduceScatter),
                ("all_gather", hvdc.CompressedAllGather),
            )
            if name in options
        }
        self._model = copy.deepcopy(self._plain)
        for module in (*_blocks(self._model), self._model):
            fully_shard(module, mesh=mesh if stock else mesh["shard"])
        if stock:
            self._count_stock(ranks // shards)
        elif compression.name != LOCAL:
            self.compressor = compressions.make(
                hvdc, compression.name, self._model, mesh=mesh, **options
            )
        self._within = [
            kind(self._model, codec_from_config({"codec": codec}), seed=options["seed"])
            for kind, codec in chosen.items()
        ]

    def _step(self, inputs: np.ndarray, labels: np.ndarray, lr: float) -> float:
        loss = super()._step(inputs, labels, lr)
        if self._within:
            self.counters = Counters()
            for exchange in self._within:
                self.counters.add(exchange.counters)
        return loss

    def _collect(self) -> None:
        """Gathers the shards, since ranks test equally many batches only where each has a whole model."""
        for own, shard in zip(self._plain.parameters(), self._model.parameters(), strict=True):
            assert isinstance(shard, DTensor)
            own.copy_(shard.full_tensor())
        for mine, buffer in zip(self._plain.buffers(), self._model.buffers(), strict=True):
            mine.copy_(buffer)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that a model runs one after the other; each is gathered and reduced by itself."""
    for module in model.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield from (block for block in module if any(True for _ in block.parameters()))


def start(threads: int) -> TorchTrainer:
    """Initialises Horovod, torch and torch.distributed in this process."""
    # Models give views, which nothing here changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return distributed.start(FSDPSession, threads)
