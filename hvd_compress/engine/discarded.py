"""Detects gradients that a script discards without a call of ``drop_step()``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch

from hvd_compress.engine.changes import Changes
from hvd_compress.engine.optimizer_steps import updates, watch

_MESSAGE = (
    "expected a step of the optimizer between two exchanges, got gradients that were set to None: if the "
    "script has thrown them away, call compressor.drop_step() on every rank, or error feedback brings them "
    "back in later steps; if it has used them, ignore this warning"
)


class Discarded:
    """Warns once if the gradients of an exchange seem to have been discarded.

    They seem discarded if residuals count them as sent, and if all of this is true until the next exchange:
    gradients were None again, as after ``zero_grad()``; no optimizer of the parameters has made a step; and
    the smallest parameter, checked in place of all of them, has not changed. Gradients that a script sets
    to zero in place look like accumulated ones, and are not detected; neither are those of a step if only
    a device knows whether the step counts.

    Args:
        parameters: the parameters whose gradients are exchanged.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        # Kept, so that no other tensor gets the id of one of them.
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf and p.numel()]
        self._ids = {id(p) for p in self._parameters}
        self._stepped = self._warned = False
        self._suspected: list[Changes] = []
        self._anew: set[bool] = set()
        self._version, self._sample = -1, torch.empty(0, dtype=torch.float32, device="cpu")
        if self._parameters:
            self._smallest = min(self._parameters, key=torch.Tensor.numel)
            _note_none(self._smallest, self._anew)
            watch(self)

    def begin(self, last: Iterable[Changes]) -> None:
        """Looks for steps since the last exchange; called before an exchange's first gradient.

        Args:
            last: the changes of the last exchange.
        """
        if self._warned or not self._parameters:
            return
        version = self._smallest._version
        self._suspected = [] if self._stepped or version != self._version else list(last)
        if not self._suspected:
            # Some optimizers change what shares the parameter's memory, and not its version.
            self._sample = self._smallest.detach().clone()
        self._version, self._stepped = version, False

    def end(self) -> None:
        """Warns if gradients seem discarded; called after an exchange's last gradient."""
        anew, suspected = bool(self._anew), self._suspected
        self._anew.clear()
        self._suspected = []
        if (
            anew
            and any(one.counts() for one in suspected)
            and torch.equal(self._sample, self._smallest.detach())
        ):
            self._warned = True
            warnings.warn(_MESSAGE, UserWarning, stacklevel=2)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of an optimizer, whatever its parameters are."""
        if not self._stepped:
            self._stepped = updates(optimizer, self._ids)


def _note_none(parameter: torch.Tensor, anew: set[bool]) -> None:
    # The hook lives as long as the parameter: it must not hold a compressor, nor the parameter itself.
    own = weakref.ref(parameter)

    def note(_: torch.Tensor) -> None:
        held = own()
        if held is not None and held.grad is None:
            anew.add(True)

    parameter.register_hook(note)
