"""The commits of compressors in TensorFlow, each of which goes on where the one before it left off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.elastic.commits import Commit, Commits
from hvd_compress.exchanges.shards import Shared, transpose, transpose_back
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.slots import Slot


class TensorFlowCommits(Commits):
    """The commits of one compressor after the other.

    Graphs hold a rank's number and who owns which part, so that each reset needs a new compressor.
    """

    _compressor: Compressor

    def continue_with(self, compressor: Compressor) -> None:
        """Has a new compressor go on; called by all ranks.

        Args:
            compressor: this rank's.

        Raises:
            ValueError: it cannot.
        """
        _check(compressor)
        self._compressor = compressor
        self.settle()

    @property
    def place(self) -> tuple[int, int]:
        """As of :class:`Commits`."""
        owner = self._compressor.owner
        return owner.rank, owner.size

    def take(self) -> Commit:
        """As of :class:`Commits`; the state is what is unsent of each gradient."""
        slots, (rank, _) = self._compressor.slots, self.place
        compressor = self._compressor
        unsent = [
            _unsent_of(slot, rank, compressor.owners_of(slot), compressor.shared(slot))
            for slot in slots
        ]
        positions = [(int(slot.exchanges),) for slot in slots]
        return Commit(self.place, positions, [len(one) for one in unsent], unsent)

    def _unsent(self, commit: Commit) -> np.ndarray:
        return np.concatenate([*commit.state, np.zeros(0, np.float32)])

    def _gather(self, value: Any, what: str) -> list[Any]:
        return hvd.allgather_object(value, name=f"hvd_compress.elastic.{what}")

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        name = "hvd_compress.elastic.unsent"
        return hvd.allreduce(tf.constant(numbers), op=hvd.Sum, name=name).numpy()

    def _go_back(self, commit: Commit) -> None:
        self._begin_with(commit.state)

    def _begin_with(self, parts: Sequence[np.ndarray] | None) -> None:
        self._kept = _Kept(dict(enumerate(parts or [])))
        self._compressor.inherit(self._kept)

    def _set_positions(self, positions: Sequence[tuple[int, ...]]) -> None:
        self._kept.exchanges.update({index: n for index, (n,) in enumerate(positions)})


@dataclass
class _Kept:
    """What gradients will start with, by their positions."""

    residuals: dict[int, np.ndarray]
    exchanges: dict[int, int] = field(default_factory=dict)

    def give(self, slot: Slot, *, owners: int, shared: Shared | None, has_residuals: bool) -> None:
        residual = self.residuals.pop(slot.index, None)
        if residual is not None and residual.any():
            slot.residual.assign(transpose(residual, shared.transposed if shared else None))
        slot.exchanges.assign(self.exchanges.pop(slot.index, 0))


def _check(compressor: Compressor) -> None:
    process_set = compressor.process_set.process_set_id
    if process_set != hvd.global_process_set.process_set_id:
        raise ValueError(
            f"TensorFlowState.begin: expected a compressor with process_set=None, got one with process set "
            f"{process_set}, which a reset makes invalid"
        )
    if not compressor.keeps_residuals:
        raise ValueError(
            "TensorFlowState.begin: expected an exchange in which ranks keep residuals of their own "
            "gradients, got 'hierarchical' (for Auto, pass exchanges= without it)"
        )
    if compressor.slots:
        raise ValueError(
            f"TensorFlowState.begin: expected a compressor that is new, got one with which "
            f"{len(compressor.slots)} gradients have been traced"
        )


def _unsent_of(slot: Slot, rank: int, owners: int, shared: Shared | None) -> np.ndarray:
    """What a rank would still add to the sum of all ranks' gradients, shape=(n,), float32, row-major."""
    residual, owned = slot.residual.numpy(), slot.owned.numpy()
    if slot.route.uncompressed:
        return np.zeros(0, np.float32)
    count = len(residual) if slot.shape is None else int(np.prod(slot.shape))
    unsent = np.zeros(count, np.float32)
    unsent[: len(residual)] += residual
    if len(owned):
        assert shared is not None
        begin, end = shared.shards(owners, slot.key).of(rank % owners)
        unsent[begin:end] += np.float32(owners) * owned  # Of an average among so many.
    if shared is not None and count:
        unsent = transpose_back(unsent, shared.transposed)
    return unsent
