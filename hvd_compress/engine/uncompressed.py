"""Gradients that travel as they are, in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.engine.comm import Collective, Comm, Exchanging
from hvd_compress.ranks.counters import Counters


class Uncompressed:
    """Gradients that are added up by an all_reduce; stands where a :class:`Batch` does.

    Args:
        gradients: results are written over them.
        dtype: that they are added in.
        buffer: memory that holds exactly these gradients, one behind the other, if there is any; or a
            sparse gradient alone.
        divisor: what gradients are divided by before they are added: in half precision, a sum might
            overflow.
    """

    error: Exception | None = None
    nonfinite = False
    word: torch.Tensor | None = None

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        dtype: torch.dtype,
        *,
        buffer: torch.Tensor | None = None,
        divisor: int = 1,
    ) -> None:
        self._gradients = gradients
        self._divisor = divisor
        self._buffer = buffer
        if buffer is None or buffer.dtype != dtype:
            buffer = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype)
        self._values = buffer.div_(divisor) if divisor > 1 else buffer
        self._sent = Counters()

    def exchange(self, comm: Comm) -> Exchanging:
        """The exchange, as the functions of :mod:`hvd_compress.engine.exchanges` make it."""
        self._values = yield comm.all_reduce(self._values)

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum over the gradients."""
        if scale * self._divisor != 1:
            self._values.mul_(scale * self._divisor)
        if self._values is self._buffer:
            return
        parts = self._values.split([gradient.numel() for gradient in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            if gradient.data_ptr() != part.data_ptr():
                gradient.copy_(part.view(gradient.shape))

    def settle(self, dropped: bool | torch.Tensor) -> None:
        """Does nothing: no residual has changed."""

    def note(self, collective: Collective) -> None:
        """As :meth:`Batch.note`."""
        collective.count(self._sent)

    def count(self, counters: Counters) -> None:
        """As :meth:`Batch.count`."""
        counters.add(self._sent)
