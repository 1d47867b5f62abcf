"""What one rank encodes with, the same for all of its parameters."""

from __future__ import annotations

from typing import Any

from hvd_compress.engine.changes import LastExchange
from hvd_compress.engine.executors import Executors


class EncodeContext:
    """Kernels, the noise's seed, and the loss scale.

    Args:
        kernels: encode and decode.
        seed: of the noise.
        rank: this rank within its process set or group.
        grad_scaler: whose loss scale the gradients are multiplied by; None is none.
        last: gets the changes of each exchange; None is a new one.

    Attributes:
        loss_scale: what the gradients of this step are multiplied by.
    """

    def __init__(
        self,
        kernels: Executors,
        seed: int,
        rank: int,
        grad_scaler: Any | None,
        last: LastExchange | None = None,
    ) -> None:
        self.kernels = kernels
        self.last = last or LastExchange()
        self.seed = seed
        self.rank = rank
        self.loss_scale = 1.0
        self._grad_scaler = grad_scaler

    def begin_step(self) -> None:
        """Called before a step's first gradient: reads the loss scale, once, for that waits for a GPU."""
        self.last.begin()
        if self._grad_scaler is not None:
            self.loss_scale = float(self._grad_scaler.get_scale())
