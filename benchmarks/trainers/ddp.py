"""Training with PyTorch's DDP."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, POWERSGD_HOOK, STOCK, Compression
from benchmarks.settings import Settings
from benchmarks.trainers import distributed
from benchmarks.trainers.torch import TorchTrainer


class DDPSession(distributed.DistributedSession):
    """Implements :class:`benchmarks.loop.Session`."""

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        if compression.name == LOCAL:
            return
        if compression.name == POWERSGD_HOOK:
            # With a limit of its own, DDP makes no smaller first bucket: the hook's buckets wait for each
            # other, and two may wait for good under Gloo. Its bytes are not counted.
            self._model = hooked = DistributedDataParallel(self._model, bucket_cap_mb=1024)
            state = power_sgd.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            hooked.register_comm_hook(state, power_sgd.powerSGD_hook)
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
