"""A batch's gradients as levels that ranks add."""

from __future__ import annotations

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.engine.batch import Batch
from hvd_compress.exchanges import integer_sum
from hvd_compress.exchanges.layout import CHANGED, USED

_FACTORS = torch.tensor(integer_sum.FACTORS, dtype=torch.int64, device="cpu")


class LevelBatch:
    """The norms and the levels of a batch's gradients, in the memory of the CPU.

    Args:
        batch: the batch.

    Attributes:
        flags: the position of the first flag in the message of norms.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._layout, self._kernels = batch.plan.level_table
        self._own = self._norms = torch.empty(0, dtype=torch.float32, device="cpu")
        self.flags = self._layout.norms - len(batch.plan.members)

    def norms(self) -> torch.Tensor:
        """This rank's norms and flags, shape=(norms,), float32; zeros if the work fails."""

        def work() -> torch.Tensor:
            message = torch.zeros(self._layout.norms, dtype=torch.float32, device="cpu")
            self._residuals = self._batch.residuals.take_up()
            self._kernels.norms(self._batch.flats, self._residuals[0], message)
            self._batch.write_flags(message[self.flags :])
            self._own = message.clone()  # The other ranks' come into the message.
            return message

        elements = sum(member.count for member in self._batch.plan.members)
        return self._batch.encoding(work, self._layout.norms, torch.float32, elements)

    def encode(self, norms: torch.Tensor) -> torch.Tensor:
        """This rank's levels, followed by a 1 and a check; zeros if the work fails.

        The work fails if the norms cannot be the largest norms of all ranks.

        Args:
            norms: the largest norms of all ranks, shape=(norms,), float32.

        Returns:
            The message, shape=(words,), int32.
        """
        self._norms = norms

        def work() -> torch.Tensor:
            self._check_norms()
            message = torch.zeros(self._layout.words, dtype=torch.int32, device="cpu")
            batch = self._batch
            self._kernels.encode(batch.flats, *self._residuals, batch.steps, norms, message)
            message[-2] = int(self._batch.encodes)
            message[-1] = self._check_of(message)
            return message

        return self._batch.encoding(work, self._layout.words, torch.int32)

    def load(self, norms: torch.Tensor, words: torch.Tensor) -> None:
        """Takes the ranks' sums; finds out whether they, or the norms, were altered in transit.

        Args:
            norms: the largest norms of all ranks, shape=(norms,), float32.
            words: the sum of all ranks' levels, shape=(words,), int32.
        """
        batch = self._batch
        if (int(words[-1]) - self._check_of(words)) % integer_sum.MODULUS:
            batch.error = batch.error or PayloadError(
                f"{batch.plan.names}: expected levels and norms that agree with their "
                f"checks, got some that were altered in transit"
            )
        batch.count_senders(int(words[-2]))
        batch.load_by(lambda scale: self._decode(words, scale), norms[None, self.flags :])

    def _decode(self, words: torch.Tensor, scale: float) -> None:
        self._batch.nonfinite |= bool(self._norms[: self.flags].isinf().any())
        with self._batch.decoding():
            self._kernels.decode(self._batch.flats, self._norms, words, scale)

    def _check_norms(self) -> None:
        """Raises ``PayloadError`` if a norm is NaN or below this rank's own, or a flag is invalid."""
        flags = self._norms[self.flags :].tolist()
        if not bool((self._norms >= self._own).all()) or not {0, USED, CHANGED}.issuperset(flags):
            raise PayloadError(
                f"{self._batch.plan.names}: expected the ranks' largest norms, got some that were "
                f"altered in transit"
            )

    def _check_of(self, words: torch.Tensor) -> int:
        """The check of the levels, plus that of the norms for each rank that has counted itself."""
        columns = _columns(words[:-1]) + words[-2] * _columns(self._norms.view(torch.int32))
        return int((columns % integer_sum.MODULUS) @ _FACTORS) % integer_sum.MODULUS


def _columns(words: torch.Tensor) -> torch.Tensor:
    """The sum of the words in each column, shape=(columns,), int64."""
    width = integer_sum.COLUMNS
    rows = words.numel() // width
    columns = words[: rows * width].view(rows, width).sum(0, dtype=torch.int64)
    rest = words[rows * width :]
    columns[: rest.numel()] += rest
    return columns
