"""Notices PyTorch's optimizers that step without the compressor of their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from hvd_compress.engine.optimizer_steps import updates, watch
from hvd_compress.ranks.unused import Use

_watching: weakref.WeakSet[TorchUse] = weakref.WeakSet()


class TorchUse(Use):
    """A :class:`Use` of a compressor during whose life several ranks may train.

    They have trained without it where an optimizer of its parameters has stepped, and no other compressor
    exchanges gradients of these: one that a script makes to print it, or to read a state, is not missed.

    Args:
        name, remedy: as for :class:`Use`.
        parameters: whose gradients are exchanged; none, where tensors come later, are any optimizer's.
        ranks: counts the ranks of the job.
    """

    def __init__(
        self,
        name: str,
        remedy: str,
        parameters: Iterable[torch.Tensor],
        ranks: Callable[[], int],
    ) -> None:
        super().__init__(name, remedy)
        self.watch_parameters(parameters)
        self._ranks = ranks
        self._suspected = False
        _watching.add(self)
        watch(self)

    def watch_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Says whose gradients are exchanged."""
        self._ids = {id(p) for p in parameters}

    @property
    def missed(self) -> bool:
        return not self.exchanged

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Called behind every step of an optimizer."""
        if self.exchanged or self._suspected or self._ranks() == 1:
            return
        if self._ids and not updates(optimizer, self._ids):
            return
        if any(other.exchanged and self._shares(other) for other in tuple(_watching)):
            return
        self._suspected = True
        self.suspect()

    def _shares(self, other: TorchUse) -> bool:
        """Whether another compressor may be for the same parameters."""
        return not self._ids or not other._ids or not self._ids.isdisjoint(other._ids)
