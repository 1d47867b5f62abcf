"""Training with PyTorch's DDP."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, POWERSGD, STOCK, Compression
from benchmarks.rivals.powersgd import ONE_BUCKET, PowerSGD
from benchmarks.settings import Settings
from benchmarks.trainers import distributed
from benchmarks.trainers.torch import TorchTrainer


class DDPSession(distributed.DistributedSession):
    """Implements :class:`benchmarks.loop.Session`."""

    _power_sgd: PowerSGD | None = None

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        if compression.name == LOCAL:
            return
        if compression.name == POWERSGD:
            model = DistributedDataParallel(self._model, bucket_cap_mb=ONE_BUCKET)
            self._power_sgd = PowerSGD(**compression.options)
            model.register_comm_hook(None, self._power_sgd.hook)
            self.counters = self._power_sgd.counters
        else:
            model = DistributedDataParallel(self._model)
        self._model = model
        if compression.name == STOCK:
            self._count_stock(dist.get_world_size())
        elif compression.name != POWERSGD:
            self.compressor = compressions.make(hvdc, compression.name, model, **options)
            model.register_comm_hook(self.compressor, hvdc.hook)

    def residual_norm(self) -> float:
        return self._power_sgd.residual_norm() if self._power_sgd else super().residual_norm()


def start(threads: int) -> TorchTrainer:
    """Initialises Horovod, torch and torch.distributed in this process."""
    return distributed.start(DDPSession, threads)
