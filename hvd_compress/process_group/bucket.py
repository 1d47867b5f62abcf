"""Tensors that are handed over together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.changes import Changes
from hvd_compress.engine.drivers import Pending
from hvd_compress.engine.inquiry import Inquiry
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.exchanges.registry import Scope


@dataclass(eq=False)
class Part:
    """Tensors of a bucket that travel together.

    Attributes:
        content: the tensors.
        pending: their exchange.
        stages: the scopes of its collectives.
        remainders: the scopes of those that follow where messages were too short.
    """

    content: Batch | Inquiry | Uncompressed
    pending: Pending
    stages: tuple[Scope, ...]
    remainders: tuple[Scope, ...] = ()


@dataclass(eq=False)
class Bucket:
    """One bucket of DDP's, or the tensors of one call, on their way.

    Attributes:
        result: what :attr:`future` gets: the tensors, whose memory the averages or sums are written over.
        device: where they are.
        scale: factor on the ranks' sums.
        parts: what it sends.
        changes: what it does to residuals beside those of its parts.
        rerouted: whether some tensor travels in another way than in the ranks' last agreement.
        inquiries: what is sent in the former way to ask whether it does so on all ranks, where some was
            encoded then: as many parts as ranks without a change send, of which the first one asks.
        waiting: how many of the parts are not back yet.
        held: whether residuals wait, when all is back, for whoever waits for the results to settle them.
        dropped: then, what is known of the step: as :meth:`settle` takes it.
        future: complete when the results are written; or gets the exception.
    """

    result: Any
    device: torch.device
    scale: float
    parts: list[Part] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    rerouted: bool = False
    inquiries: list[Part] = field(default_factory=list)
    waiting: int = 0
    held: bool = False
    dropped: bool | torch.Tensor = False
    future: torch.futures.Future[Any] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        on_gpu = self.device.type != "cpu"
        self.future = torch.futures.Future(devices=[self.device] if on_gpu else None)

    def write(self) -> None:
        """Writes :attr:`scale` times the sums of the ranks' tensors over the tensors."""
        for part in self.parts:
            part.content.write(self.scale)

    def judge(self, dropped: bool | torch.Tensor) -> None:
        """Settles residuals, unless they are held."""
        self.dropped = dropped
        if not self.held:
            self.settle(dropped)

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Has the next residuals count, or not; as :meth:`Batch.settle`."""
        self.changes.settle(dropped)
        for part in self.parts:
            part.content.settle(dropped)

    def resolve(self, error: Exception | None = None) -> None:
        """Completes the future, unless that has been done."""
        with self._lock:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(self.result)
            else:
                self.future.set_exception(error)
