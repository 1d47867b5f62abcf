"""Training with few exchanges (:class:`hvd_compress.diloco.DiLoCo`), beside DDP with one in every step."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

import hvd_compress.distributed as hvdc
from benchmarks import compressions
from benchmarks.compressions import LOCAL, STOCK, Compression
from benchmarks.settings import Settings
from benchmarks.trainers import distributed
from benchmarks.trainers.ddp import DDPSession
from benchmarks.trainers.torch import TorchSession, TorchTrainer
from hvd_compress.codecs import NoCompression
from hvd_compress.diloco import AVERAGE, DiLoCo

_SYNC_EVERY = 100
_OWN = ("sync_every", "fragments", "delay", "mixing")
_OUTER = ("outer_lr", "outer_momentum")
"""Options of a compression that are not the codec's: DiLoCo's, and the outer optimizer's."""


class DiLoCoSession(distributed.DistributedSession):
    """Implements :class:`benchmarks.loop.Session`: the common parameters are tested.

    A compression takes DiLoCo's arguments beside the codec's, and ``outer_lr`` and ``outer_momentum``.
    Ranks that train alone average their parameters once, at the end.
    """

    _diloco: DiLoCo | None = None

    def _wrap(self, settings: Settings, compression: Compression, options: dict[str, Any]) -> None:
        name = compression.name
        if name == LOCAL:
            name, options = NoCompression.name, {"sync_every": sys.maxsize}
        own = {one: options.pop(one) for one in _OWN if one in options}
        sgd = functools.partial(
            torch.optim.SGD,
            lr=options.pop("outer_lr", AVERAGE.keywords["lr"]),
            momentum=(momentum := options.pop("outer_momentum", 0.0)),
            nesterov=momentum > 0,
        )
        self._model = copy.deepcopy(self._plain)
        try:
            self.compressor = compressions.make(hvdc, name, **options)
        except TypeError as error:
            raise TypeError(f"{error}; of DiLoCo: {', '.join((*_OWN, *_OUTER))}") from error
        self._at_once = not own.get("delay") and own.get("fragments", 1) == 1
        self._sync_every = own.setdefault("sync_every", _SYNC_EVERY)
        self._diloco = DiLoCo(self._model, self.compressor, outer_optimizer=sgd, **own)

    def _step(self, inputs: np.ndarray, labels: np.ndarray, lr: float) -> float:
        loss = super()._step(inputs, labels, lr)
        if self._diloco:
            self._diloco.step()
        return loss

    def finish(self) -> None:
        """Exchanges what has been learnt since the last exchange, if anything has."""
        if self._diloco:
            if not self._at_once or self._diloco.steps % self._sync_every:
                self._diloco.synchronize()
            self._collect()

    @torch.no_grad()
    def _collect(self) -> None:
        if self._diloco:
            common = self._diloco.common_parameters
            for name, own in self._plain.named_parameters():
                own.copy_(common[name])
            for mine, buffer in zip(self._plain.buffers(), self._model.buffers(), strict=True):
                mine.copy_(buffer)


def _session(
    model: nn.Module, settings: Settings, compression: Compression, seed: int
) -> TorchSession:
    kind = DDPSession if compression.name == STOCK else DiLoCoSession
    return kind(model, settings, compression, seed)


def start(threads: int) -> TorchTrainer:
    """Initialises Horovod, torch and torch.distributed in this process."""
    return distributed.start(_session, threads)
