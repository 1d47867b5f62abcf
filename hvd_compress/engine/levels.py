"""A batch's gradients as levels that ranks add."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvd_compress.engine.batch import Batch, columns
from hvd_compress.exchanges.layout import LevelLayout


class LevelBatch:
    """The norms and the levels of a batch's gradients, in the memory of the CPU.

    Args:
        batch: the gradients.
        layout: makes the layout of the two messages, when it is asked for the first time.

    Attributes:
        flags: where the flags begin in the message of norms.
    """

    def __init__(self, batch: Batch, layout: Callable[[], LevelLayout]) -> None:
        self._batch = batch
        self._layout, self._kernels = batch.plan.level_table(layout)
        self._norms = torch.empty(0, dtype=torch.float32, device="cpu")
        self.flags = self._layout.norms - len(batch.plan.members)

    def norms(self) -> torch.Tensor:
        """This rank's norms, and its flags, shape=(norms,), float32; zeros if that failed."""

        def work() -> torch.Tensor:
            message = torch.zeros(self._layout.norms, dtype=torch.float32, device="cpu")
            self._residuals = self._batch.take_up()
            residuals, _ = columns(self._residuals)
            self._kernels.norms(self._batch.flats, residuals, message)
            self._batch.write_flags(message[self.flags :])
            return message

        self._batch.encoded = sum(member.count for member in self._batch.plan.members)
        with self._batch.encoding():
            return self._batch.guard(work, self._layout.norms, torch.float32)

    def encode(self, norms: torch.Tensor) -> torch.Tensor:
        """This rank's levels, and a 1 behind them; zeros if that failed.

        Args:
            norms: the ranks' largest, shape=(norms,), float32.

        Returns:
            shape=(words,), int32.
        """
        self._norms = norms

        def work() -> torch.Tensor:
            message = torch.zeros(self._layout.words, dtype=torch.int32, device="cpu")
            residuals, following = columns(self._residuals)
            steps = self._batch.steps
            self._kernels.encode(self._batch.flats, residuals, following, steps, norms, message)
            message[-1] = int(self._batch.encodes)
            return message

        with self._batch.encoding():
            return self._batch.guard(work, self._layout.words, torch.int32)

    def decode(self, words: torch.Tensor, scale: float) -> None:
        """Writes ``scale`` times the ranks' sums to the gradients.

        Args:
            words: the sum of all ranks' levels, shape=(words,), int32.
            scale: factor on the sums.
        """
        self._batch.nonfinite |= bool(self._norms[: self.flags].isinf().any())
        with self._batch.decoding():
            self._kernels.decode(self._batch.flats, self._norms, words, scale)
