"""Training with PyTorch's DDP."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, STOCK, Compression
from benchmarks.settings import Settings
from benchmarks.trainers import distributed
from benchmarks.trainers.torch import TorchTrainer


class DDPSession(distributed.DistributedSession):
    """Implements :class:`benchmarks.loop.Session`."""

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        if compression.name == LOCAL:
            return
        self._model = model = DistributedDataParallel(self._model)
        if compression.name == STOCK:
            self._count_stock(dist.get_world_size())
        else:
            self.compressor = compressions.make(hvdc, compression.name, model, **options)
            model.register_comm_hook(self.compressor, hvdc.hook)


def start(threads: int) -> TorchTrainer:
    """Initialises Horovod, torch and torch.distributed in this process."""
    return distributed.start(DDPSession, threads)
