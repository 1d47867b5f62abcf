"""The commits of a PyTorch compressor under Horovod."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.elastic.commits import Commit, Commits, Positions
from hvd_compress.engine.state import unsent
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
        compressor.check_elastic()
        self.compressor = compressor
        self._shapes = compressor.shapes
        self._begun = self.take()

    def take(self) -> Commit:
        """Copies this rank's part of a commit; the state is that of ``Compressor.commit``.

        Raises:
            ExchangeError: gradients are being sent.
        """
        state = self.compressor.commit()
        positions = [(saved["step"], saved["exchanges"]) for saved in state["tensors"].values()]
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        return Commit(self.place, positions, list(self._shapes), sizes, state)

    @property
    def place(self) -> tuple[int, int]:
        """The compressor's rank, and the number of ranks."""
        return self.compressor.place

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning, and forgets the step in progress."""
        self.forget()
        commit = self._last or self._begun
        self._go_back(commit, commit.positions)

    def _unsent(self, commit: Commit) -> np.ndarray:
        tensors = commit.state["tensors"]
        sums = [unsent(tensors[name], shape) for name, shape in self._shapes.items()]
        return torch.cat(sums).numpy()

    def _gather(self, value: Any, what: str) -> list[Any]:
        return tell(value, f"hvd_compress.elastic.{what}")

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        name = "hvd_compress.elastic.unsent"
        return hvd.allreduce(torch.from_numpy(numbers), op=hvd.Sum, name=name).numpy()

    def _go_back(self, commit: Commit, positions: Positions) -> None:
        self.compressor.go_back(commit.state, positions)

    def _begin_with(
        self, names: Sequence[str], parts: Sequence[np.ndarray], positions: Positions
    ) -> None:
        self.compressor.begin_with((torch.from_numpy(part.copy()) for part in parts), positions)
