"""The context in which one rank encodes, the same for all of its parameters."""

from __future__ import annotations

from typing import Any

from hvd_compress.engine.changes import LastExchange
from hvd_compress.engine.executors import Executors


class EncodeContext:
    """The kernels, the seed of the noise, and the loss scale.

    Args:
        kernels: the kernels that encode and decode.
        seed: the seed of the noise.
        rank: this rank within its process set or group.
        grad_scaler: the scaler with the gradients' loss scale; None if gradients are not scaled.
        last: receives the changes of each exchange; None means a new object.

    Attributes:
        loss_scale: the loss scale of this step's gradients.
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
        """Reads the loss scale once, since that waits for a GPU; called before a step's first gradient."""
        self.last.begin()
        if self._grad_scaler is not None:
            self.loss_scale = float(self._grad_scaler.get_scale())
