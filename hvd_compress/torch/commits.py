"""The commits of a PyTorch compressor under Horovod."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.elastic.commits import Commit, Commits, Positions
from hvd_compress.engine.state import begin_with, unsent
from hvd_compress.torch.compressor import Compressor
from hvd_compress.torch.values import tell


class TorchCommits(Commits):
    """The commits of one compressor.

    Args:
        compressor: this rank's compressor, among all ranks of the job.

    Attributes:
        compressor: this rank's compressor.

    Raises:
        ValueError: the compressor has a process set, or an owner step.
    """

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        if compressor._ranks.process_set not in (None, hvd.global_process_set):
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
        self._slots = list(compressor._slots)
        self._begun = self.take()

    def take(self) -> Commit:
        """Copies this rank's part of a commit; the state is a snapshot of the compressor.

        Raises:
            ExchangeError: gradients are being sent.
        """
        self.compressor._ranks.expect_idle("commit")
        self.compressor._kernels.settle()
        state = copy.deepcopy(self.compressor._state.snapshot(*self.place))
        positions = [(slot.step, slot.exchanges) for slot in self._slots]
        names, sizes = [slot.name for slot in self._slots], [slot.count for slot in self._slots]
        return Commit(self.place, positions, names, sizes, state)

    @property
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and the number of ranks."""
        group = self.compressor._ranks.group
        return group.rank, group.size

    def _unsent(self, commit: Commit) -> np.ndarray:
        tensors = commit.state["tensors"]
        sums = [unsent(tensors[slot.name], slot.shape) for slot in self._slots]
        return torch.cat(sums).numpy()

    def _gather(self, value: Any, what: str) -> list[Any]:
        return tell(value, f"hvd_compress.elastic.{what}")

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        name = "hvd_compress.elastic.unsent"
        return hvd.allreduce(torch.from_numpy(numbers), op=hvd.Sum, name=name).numpy()

    def _go_back(self, commit: Commit, positions: Positions) -> None:
        state = commit.state
        owned_by = self.compressor._routes.owned_by
        self.compressor._state.restore(state, state["rank"], state["size"], owned_by)
        self._continue_at(positions)

    def _begin_with(
        self, names: Sequence[str], parts: Sequence[np.ndarray], positions: Positions
    ) -> None:
        for slot, part in zip(self._slots, parts, strict=True):
            begin_with(slot, torch.from_numpy(part.copy()))
        self._continue_at(positions)

    def _continue_at(self, positions: Positions) -> None:
        self.compressor._state.last.replace()
        for slot, (step, exchanges) in zip(self._slots, positions, strict=True):
            slot.step, slot.exchanges = step, exchanges
