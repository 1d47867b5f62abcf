"""Buckets: tensors that are handed over together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.comm import Pending
from hvd_compress.engine.inquiry import Inquiry
from hvd_compress.engine.residuals import Changes
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.exchanges.base import Scope


@dataclass(eq=False)
class Part:
    """Tensors of a bucket that are sent together.

    Attributes:
        content: the tensors.
        pending: their exchange.
        stages: the scopes of the exchange's collectives.
        remainders: the scopes of the additional collectives if messages were too short.
    """

    content: Batch | Inquiry | Uncompressed
    pending: Pending
    stages: tuple[Scope, ...]
    remainders: tuple[Scope, ...] = ()


@dataclass(eq=False)
class Bucket:
    """A DDP bucket, or the tensors of one call, during the exchange.

    Attributes:
        result: the result of :attr:`future`: the tensors, over which the averages or sums are written.
        device: the device of the tensors.
        scale: a factor on the ranks' sums.
        parts: the parts that are sent.
        changes: the changes of residuals other than those of the parts.
        rerouted: whether some tensor's route differs from the one in the ranks' last agreement.
        inquiries: the parts that ask whether the routes have changed on all ranks, if the former routes
            encode some tensor. A rank without the change sends parts of the same number and form; the
            first part asks.
        waiting: the number of parts whose results have not arrived yet.
        held: whether residuals are settled by the code that waits for the results, and not when the last
            result arrives.
        dropped: with ``held``, the argument for :meth:`settle`.
        future: a future that completes when the results are written, or with the exception.
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
        """Overwrites the tensors with :attr:`scale` times the sums of the ranks' tensors."""
        for part in self.parts:
            part.content.write(self.scale)

    def judge(self, dropped: bool | torch.Tensor) -> None:
        """Records whether the step is dropped, and settles residuals unless they are held."""
        self.dropped = dropped
        if not self.held:
            self.settle(dropped)

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Keeps or discards the next residuals; see :meth:`Batch.settle`."""
        self.changes.settle(dropped)
        for part in self.parts:
            part.content.settle(dropped)

    def resolve(self, error: Exception | None = None) -> None:
        """Completes the future, unless it is complete."""
        with self._lock:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(self.result)
            else:
                self.future.set_exception(error)
