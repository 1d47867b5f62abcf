"""The commits of compressors in TensorFlow, each of which continues where the one before stopped."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.elastic.commits import Commit, Commits, Positions
from hvd_compress.exchanges.shards import Shared, transpose, transpose_back
from hvd_compress.tensorflow.collectives import tell
from hvd_compress.tensorflow.compressor import Compressor
from hvd_compress.tensorflow.slots import GraphSlot, common_name
from hvd_compress.tensorflow.state import Inheritance, names_in_order


class TensorFlowCommits(Commits):
    """The commits of successive compressors.

    Graphs hold a rank's number and the owner of each part, so each reset needs a new compressor.
    """

    _begun = Commit((0, 1), (), (), (), ())
    _compressor: Compressor

    def __init__(self) -> None:
        super().__init__()
        self._kept = _Kept([])

    def continue_with(self, compressor: Compressor) -> None:
        """Gives a new compressor the state of the last commit; called by all ranks.

        Args:
            compressor: this rank's compressor.

        Raises:
            ValueError: the compressor cannot continue.
        """
        _check(compressor)
        self._compressor = compressor
        self.settle()

    @property
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and the number of ranks."""
        owner = self._compressor.owner
        return owner.rank, owner.size

    def take(self) -> Commit:
        """Copies this rank's part of a commit: the unsent part of each gradient, even if not traced again.

        Raises:
            ValueError: some variables cannot be told apart.
        """
        compressor, rank = self._compressor, self.place[0]
        slots = compressor.slots
        names = names_in_order([(slot.variable_name, slot.call) for slot in slots], "commit")
        unsent = [
            _unsent_of(slot, rank, compressor.owners_of(slot), compressor.shared(slot))
            for slot in slots
        ]
        positions = [(int(slot.exchanges),) for slot in slots]
        for name, numbers, exchanges in self._kept.left:
            names.append(name)
            unsent.append(np.zeros_like(numbers) if compressor.begins_anew else numbers)
            positions.append((exchanges,))
        return Commit(self.place, positions, names, [len(one) for one in unsent], unsent)

    def _comparable(self, names: Sequence[str]) -> list[str]:
        return list(map(common_name, names))

    def _unsent(self, commit: Commit) -> np.ndarray:
        return np.concatenate([*commit.state, np.zeros(0, np.float32)])

    def _gather(self, value: Any, what: str) -> list[Any]:
        return tell(value, f"hvd_compress.elastic.{what}")

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        name = "hvd_compress.elastic.unsent"
        return hvd.allreduce(tf.constant(numbers), op=hvd.Sum, name=name).numpy()

    def _go_back(self, commit: Commit, positions: Positions) -> None:
        self._begin_with(commit.names, commit.state, positions)

    def _begin_with(
        self, names: Sequence[str], parts: Sequence[np.ndarray], positions: Positions
    ) -> None:
        counts = [exchanges for (exchanges,) in positions]
        left = list(zip(names, parts, counts, strict=True))
        self._kept = _Kept(left, new=self._next is None)
        self._compressor.inherit(self._kept)


@dataclass
class _Kept(Inheritance):
    """The residuals and counts that gradients begin with, by the names of their variables.

    Attributes:
        left: the entries that no gradient has taken yet: a name; the numbers that this rank still has to
            add to the sum of all ranks' gradients, shape=(n,), float32, row-major; and the number of
            exchanges so far. Those of variables with the same name are in the order of their call.
        new: whether the names are another rank's, which may count layers differently.
    """

    left: list[tuple[str, np.ndarray, int]]
    new: bool = False

    def __post_init__(self) -> None:
        self._names = sorted({self._known(name) for name, *_ in self.left})

    def give(self, slot: GraphSlot, *, owners: int, shared: Shared | None) -> None:
        """Assigns the next entry with the name of the slot's variable to the slot, or zeros."""
        name = self._known(slot.variable_name)
        if self._names and name not in self._names:
            warnings.warn(
                f"expected the variables of the last commit, {self._names}, got a gradient of "
                f"{slot.variable_name!r}, which begins without a residual: if it is one of them, make the "
                f"model once, before the function that hvd.elastic.run runs",
                stacklevel=2,
            )
        slot.begin_anew()
        for entry in self.left:
            if self._known(entry[0]) == name:
                self.left = [one for one in self.left if one is not entry]
                if entry[1].any():
                    residual = transpose(entry[1], shared.transposed if shared else None)
                    slot.begin_with(residual, np.zeros(0, np.float32))
                slot.exchanges.assign(entry[2])
                return

    def _known(self, name: str) -> str:
        return common_name(name) if self.new else name


def _check(compressor: Compressor) -> None:
    process_set = compressor.process_set.process_set_id
    if process_set != hvd.global_process_set.process_set_id:
        raise ValueError(
            f"TensorFlowState.begin: expected a compressor with process_set=None, got one with process set "
            f"{process_set}, which a reset makes invalid"
        )
    if compressor.slots:
        raise ValueError(
            f"TensorFlowState.begin: expected a compressor that is new, got one with which "
            f"{len(compressor.slots)} gradients have been traced"
        )


def _unsent_of(slot: GraphSlot, rank: int, owners: int, shared: Shared | None) -> np.ndarray:
    """The numbers a rank has yet to add to the sum of gradients, shape=(n,), float32, row-major."""
    residual, owned = (kept.numpy().astype(np.float32) for kept in slot.kept)
    if slot.route.uncompressed:
        return np.zeros(0, np.float32)
    count = len(residual) if slot.shape is None else int(np.prod(slot.shape))
    unsent = np.zeros(count, np.float32)
    unsent[: len(residual)] += residual
    if len(owned):
        assert shared is not None
        begin, end = shared.shards(owners, slot.index).of(rank)
        unsent[begin:end] += np.float32(owners) * owned  # The weight of an average of so many.
    if shared is not None and count:
        unsent = transpose_back(unsent, shared.transposed)
    return unsent
