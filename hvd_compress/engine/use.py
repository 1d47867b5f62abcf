"""Detects PyTorch optimizers that step without the compressor of their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from hvd_compress.engine.optimizer_steps import updates, watch
from hvd_compress.ranks.use import Use

_watching: weakref.WeakSet[TorchUse] = weakref.WeakSet()


class TorchUse(Use):
    """The :class:`Use` of a compressor, with a check whether several ranks have trained without it.

    The ranks have trained without it if an optimizer of its parameters has made a step, and no other
    compressor exchanges the gradients of these parameters. So a second compressor, which a script makes
    only to print it or to read a state, causes no warning.

    Args:
        name, remedy: the same as in :class:`Use`.
        parameters: the parameters whose gradients are exchanged; if empty, because the tensors are not
            known yet, the steps of any optimizer count.
        ranks: returns the number of ranks in the job.
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
        """Sets the parameters whose gradients are exchanged."""
        self._ids = {id(p) for p in parameters}

    @property
    def missed(self) -> bool:
        """Whether this compressor has not exchanged anything since an optimizer stepped without it."""
        return not self.exchanged

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of an optimizer."""
        if self.exchanged or self._suspected or self._ranks() == 1:
            return
        if self._ids and not updates(optimizer, self._ids):
            return
        if any(other.exchanged and self._shares(other) for other in tuple(_watching)):
            return
        self._suspected = True
        self.suspect()

    def _shares(self, other: TorchUse) -> bool:
        """Whether another compressor may have some of the same parameters."""
        return not self._ids or not other._ids or not self._ids.isdisjoint(other._ids)
