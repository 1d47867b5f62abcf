"""The base of trainers on torch.distributed; Horovod starts the ranks and gathers the results."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from benchmarks.compressions import Compression
from benchmarks.settings import Settings
from benchmarks.trainers import process_group
from benchmarks.trainers.torch import Start, TorchSession, TorchTrainer, optimizer, options_of


class DistributedSession(TorchSession):
    """Implements :class:`benchmarks.loop.Session`; subclasses say how ranks average."""

    _stock: tuple[int, int] | None = None
    """The ranks and bytes of the framework's own allreduce in a step."""

    def _connect(self, settings: Settings, compression: Compression, seed: int) -> None:
        self._wrap(settings, compression, options_of(compression, seed))
        if self.compressor is not None:
            self.counters = self.compressor.counters
        self._optimizer = optimizer(self._model, settings)

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        """Makes the model that is trained, and its compressor, if it has one."""

    def _count_stock(self, ranks: int) -> None:
        """Makes every step count an allreduce of this rank's gradients among the given number of ranks."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        own = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
        self._stock = ranks, sum(p.numel() * p.element_size() for p in own)

    def _step(self, inputs: np.ndarray, labels: np.ndarray, lr: float) -> float:
        loss = super()._step(inputs, labels, lr)
        if self._stock:
            ranks, count = self._stock
            self.counters.uncompressed_bytes += count
            self.counters.add_allreduce(ranks, count)
        return loss


def start(session: Start, threads: int) -> TorchTrainer:
    """Initialises Horovod, torch and torch.distributed in this process, for such sessions."""
    torch.set_num_threads(threads)
    hvd.init()
    process_group.join()
    return TorchTrainer(session)
