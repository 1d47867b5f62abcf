"""The commits of a PyTorch compressor under Horovod."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.elastic.commits import Commit, Commits
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.state import begin_with, restore, snapshot, unsent
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.values import tell


class TorchCommits(Commits):
    """The commits of one compressor.

    Args:
        compressor: this rank's compressor, among all ranks of the job.

    Attributes:
        compressor: that compressor.

    Raises:
        ValueError: the compressor has a process set, or an owner step.
    """

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        if compressor._process_set not in (None, hvd.global_process_set):
            raise ValueError(
                "TorchState: expected a compressor with process_set=None, got one with a process set, "
                "which a reset makes invalid"
            )
        if compressor._owner_step is not None:
            raise ValueError(
                "TorchState: expected a compressor without owner_step, got one whose state would be lost "
                "with the rank that owns it"
            )
        self.compressor = compressor
        self._begun = self.take()

    def take(self) -> Commit:
        """Copies this rank's part of a commit; the state is that of ``snapshot``.

        Raises:
            ExchangeError: gradients are being sent.
        """
        compressor = self.compressor
        compressor._expect_idle("commit")
        compressor._kernels.settle()
        state = copy.deepcopy(snapshot(compressor._slots, *self.place, compressor._seed))
        positions = [(saved["step"], saved["exchanges"]) for saved in state["tensors"].values()]
        names, sizes = [slot.name for slot in self._slots], [slot.count for slot in self._slots]
        return Commit(self.place, positions, names, sizes, state)

    @property
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and the number of ranks."""
        return self.compressor._rank, self.compressor._size

    def unsent(self) -> dict[str, torch.Tensor]:
        """The numbers that this rank still has to add to the sum of all ranks' gradients.

        Returns:
            A tensor for each parameter, by name, shape=(n,), float32.
        """
        parts = torch.from_numpy(self._unsent(self.take())).split(
            [slot.count for slot in self._slots]
        )
        return {slot.name: part for slot, part in zip(self._slots, parts, strict=True)}

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning, and forgets the step in progress."""
        self.forget()
        self._go_back(self._last or self._begun)

    def _unsent(self, commit: Commit) -> np.ndarray:
        tensors = commit.state["tensors"]
        sums = [unsent(tensors[slot.name], slot.shape) for slot in self._slots]
        return torch.cat(sums).numpy()

    def _gather(self, value: Any, what: str) -> list[Any]:
        return tell(value, self._called(what))

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        return hvd.allreduce(
            torch.from_numpy(numbers), op=hvd.Sum, name=self._called("unsent")
        ).numpy()

    def _go_back(self, commit: Commit) -> None:
        self.compressor._last.replace()
        seed = commit.state["seed"]
        restore(self._slots, commit.state, *commit.place, seed, self.compressor._owned_by)

    def _begin_with(self, names: Sequence[str], parts: Sequence[np.ndarray]) -> None:
        self.compressor._last.replace()
        for slot, part in zip(self._slots, parts, strict=True):
            begin_with(slot, torch.from_numpy(part.copy()))

    def _set_positions(self, names: Sequence[str], positions: Sequence[tuple[int, ...]]) -> None:
        for slot, (step, exchanges) in zip(self._slots, positions, strict=True):
            slot.step, slot.exchanges = step, exchanges

    @property
    def _slots(self) -> list[Slot]:
        return list(self.compressor._slots)

    def _called(self, what: str) -> str:
        return f"{self.compressor._prefix}.commit.{what}"
