"""What one of DDP's buckets sends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hvd_compress.exchange.registry import Scope
from hvd_compress.torch_common.batch import Batch
from hvd_compress.torch_common.drivers import Pending
from hvd_compress.torch_common.uncompressed import Uncompressed


@dataclass(eq=False)
class Part:
    """Gradients of a bucket that travel together.

    Attributes:
        content: the gradients.
        pending: their exchange.
        stages: the scopes of its collectives.
    """

    content: Batch | Uncompressed
    pending: Pending
    stages: tuple[Scope, ...]


@dataclass(eq=False)
class Bucket:
    """One bucket's gradients on their way.

    Attributes:
        buffer: the bucket's memory; the averages are written over the gradients there.
        parts: what it sends.
        waiting: how many of the parts are not back yet.
        future: gets :attr:`buffer` when it holds the averages, or the exception.
    """

    buffer: torch.Tensor
    parts: list[Part] = field(default_factory=list)
    waiting: int = 0
    future: torch.futures.Future[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        on_gpu = self.buffer.device.type != "cpu"
        self.future = torch.futures.Future(devices=[self.buffer.device] if on_gpu else None)

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sums of the ranks' gradients to the buffer."""
        for part in self.parts:
            part.content.write(scale)
