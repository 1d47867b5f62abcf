"""A batch's gradients as products of low-rank factors that ranks add."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.codecs import ErrorFeedback, PowerSGD
from hvd_compress.codecs.base import as_matrix
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.executors import keep_from_reuse
from hvd_compress.engine.sums import ordered_sum
from hvd_compress.exchanges import low_rank
from hvd_compress.exchanges.layout import USED


class LowRankBatch:
    """The factors of a batch's gradients; see :mod:`hvd_compress.exchanges.low_rank`.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        members = batch.plan.members
        self._ranks = [m.codec.rank for m in members if isinstance(m.codec, PowerSGD)]
        self._matrices = [as_matrix(member.shape) for member in members]
        shapes = list(zip(self._matrices, self._ranks, strict=True))
        self._rows = [rows * rank for (rows, _), rank in shapes]
        self._columns = [columns * rank for (_, columns), rank in shapes]
        self._tail = len(members) + 1
        self._size = sum(self._columns) + self._tail
        self._inputs: list[torch.Tensor] = []
        self._bases: list[torch.Tensor] = []

    def left(self) -> torch.Tensor:
        """This rank's left factors, shape=(n,), float32; zeros if the work fails."""

        def work() -> torch.Tensor:
            batch = self._batch
            self._residuals = list(zip(*batch.residuals.take_up(), strict=True))
            self._kept = batch.residuals.take_up_factors(self._ranks)
            bases = orthonormal([factor for factor, _ in self._kept])
            message = batch.flats[0].new_empty(sum(self._rows), dtype=torch.float32)
            for position, out in enumerate(message.split(self._rows)):
                x = self._compensated(position)
                # Into memory that is there: under autocast, the product would be in half precision.
                torch.mm(x, bases[position], out=out.view(len(x), -1))
                self._inputs.append(x)
            return message

        elements = sum(member.count for member in self._batch.plan.members)
        return self._batch.encoding(work, sum(self._rows), torch.float32, elements)

    def right(self, left: torch.Tensor) -> torch.Tensor:
        """This rank's right factors, flags and a 1, shape=(n,), float32; zeros if the work fails.

        Writes the next residuals.

        Args:
            left: the ranks' sum of the left factors.
        """

        def work() -> torch.Tensor:
            batch = self._batch
            batch.order(left)
            keep_from_reuse(left, *self._inputs)
            self._bases = orthonormal(self._split(left, self._rows))
            message = left.new_zeros(self._size)
            for position, factor in enumerate(self._split(message, self._columns)):
                x, base = self._inputs[position], self._bases[position]
                torch.mm(x.t(), base, out=factor)
                self._carry(position, x, base, factor)
            self._inputs.clear()
            batch.write_flags(message[-self._tail :])
            message[-1] = 1
            return message

        return self._batch.encoding(work, self._size, torch.float32)

    def load(self, right: torch.Tensor) -> None:
        """Takes the sum of the ranks' right factors; finds out whether all ranks have sent factors.

        Args:
            right: the sum of what ranks make in :meth:`right`.
        """
        used, counted = right[-self._tail : -1], right[-1]
        deferred = self._batch.plan.deferred
        self._batch.count_senders(counted if deferred else int(counted), "factors")
        flags = used.clamp(max=USED)[None]
        self._batch.load_by(lambda scale: self._decode(right, scale), flags)

    def _decode(self, right: torch.Tensor, scale: float) -> None:
        """Writes ``scale`` times the ranks' sums to the gradients, and the next right factors."""
        batch = self._batch
        keep_from_reuse(right, *self._bases)
        if batch.plan.deferred:
            right = torch.where(right[-1] == batch.plan.group.size, right, torch.nan)
        batch.see(right.isfinite().all())
        with batch.decoding():
            for position, factor in enumerate(self._split(right, self._columns)):
                # A column of zeros would be one in all later steps, too.
                kept, first = self._kept[position][1], batch.plan.first_factor(position)
                torch.where((factor != 0).any(0), factor, first, out=kept)
                values = product(self._bases[position], factor * scale)
                batch.flats[position].copy_(values.view(-1))
        self._bases = []

    def _split(self, numbers: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = numbers[: sum(sizes)].split(list(sizes))
        return [part.view(-1, rank) for part, rank in zip(parts, self._ranks, strict=True)]

    def _compensated(self, position: int) -> torch.Tensor:
        """The matrix of a gradient and its residual, float32, in the memory of the next residual."""
        gradient = self._batch.flats[position].view(self._matrices[position])
        before, after = self._residuals[position]
        if before is None or after is None:
            return gradient.float()
        before, after = before.view(gradient.shape), after.view(gradient.shape)
        return torch.add(gradient, before, alpha=self._feedback(position).alpha, out=after)

    def _carry(
        self, position: int, x: torch.Tensor, base: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Subtracts what this rank sends, so that the next residual is left."""
        before, _ = self._residuals[position]
        if before is None:
            return
        feedback = self._feedback(position)
        if feedback.alpha != feedback.beta:
            x.add_(before.view(x.shape), alpha=feedback.beta - feedback.alpha)
        for k in range(base.shape[1]):
            x.addcmul_(base[:, k, None], factor[:, k], value=-1)

    def _feedback(self, position: int) -> ErrorFeedback:
        return self._batch.plan.slots[position].route.feedback


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product ``left @ right.T`` of two factors, with the same bits on all processors.

    The factors have shape=(rows, rank) and (columns, rank), float32; the product has shape=(rows, columns).
    """
    result, *others = ((left[:, k, None], right[:, k].contiguous()) for k in range(left.shape[1]))
    total = torch.mul(*result)
    part = torch.empty_like(total) if others else total
    for one in others:
        total += torch.mul(*one, out=part)
    return total


def orthonormal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The columns of each matrix, orthogonalized with the same bits on all processors.

    This is :func:`hvd_compress.exchanges.low_rank.orthonormal`. Matrices of similar size are computed
    together.

    Args:
        matrices: shape=(n, rank) each, float32; n and the ranks may differ.

    Returns:
        The columns, of length 1, or zeros; shape=(n, rank) each, float32.
    """
    sizes: dict[int, list[int]] = {}
    for position, matrix in enumerate(matrices):
        sizes.setdefault(1 << (len(matrix) - 1).bit_length(), []).append(position)
    made: dict[int, torch.Tensor] = {}
    for size, positions in sizes.items():
        rank = max(matrices[position].shape[1] for position in positions)
        x = matrices[0].new_zeros((len(positions), rank, size), dtype=torch.float64)
        for columns, position in zip(x, positions, strict=True):
            matrix = matrices[position]
            columns[: matrix.shape[1], : len(matrix)] = matrix.t()
        lengths = ordered_sum(x * x).sqrt_()
        for k in range(rank):
            column, rest = x[:, k], x[:, k + 1 :]
            length = ordered_sum(column * column).sqrt_()
            column /= torch.where(length == 0, 1, length)
            column.masked_fill_(length < low_rank.LEAST * lengths[:, k], 0)
            rest -= ordered_sum(column[:, None] * rest) * column[:, None]
        for columns, position in zip(x.float(), positions, strict=True):
            rows, rank = matrices[position].shape
            made[position] = columns[:rank, :rows].t().contiguous()
    return [made[position] for position in range(len(matrices))]
