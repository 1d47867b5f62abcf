"""Watches optimizers: do they step without the compressor, or are its gradients discarded?"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_compress.engine.residuals import Changes
from hvd_compress.ranks.use import Use, warn_of_onebit

_UNSCALED = (
    "expected the GradScaler that makes the optimizer's steps as grad_scaler=, got none: residuals do not "
    "follow its scale, and error feedback brings back too much or too little where it changes; make the "
    "compressor with grad_scaler=scaler"
)
_MESSAGE = (
    "expected a step of the optimizer between two exchanges, got gradients that were set to None: if the "
    "script has thrown them away, call compressor.drop_step() on every rank, or error feedback brings them "
    "back in later steps; if it has used them, ignore this warning"
)


class TorchUse(Use):
    """The :class:`Use` of a compressor, with a check whether several ranks have trained without it.

    The ranks train without it if an optimizer of its parameters makes a step, and no other compressor
    exchanges the gradients of these parameters. So a second compressor, which a script makes only to print
    it or to read a state, causes no warning. The warning comes with a step that has gradients of the
    parameters. After other steps it comes when the process ends: trainers make an optimizer's state by a
    step without gradients, and where the parameters are not known, an exchange may follow many steps.

    With steps after the first exchange, it also warns of a GradScaler that the compressor does not know,
    and of optimizers that :class:`~hvd_compress.OneBit` does not suit.

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
        self._suspected = self._missed = self._scaled = self._warned = False
        self._onebit: set[int] = set()
        _compressors.add(self)
        _watch(self)

    def begin(self, scaled: bool = True) -> None:
        """Notes an exchange; ``scaled`` tells that residuals follow every loss scale, or there are none."""
        self.exchanged, self._scaled = True, scaled
        self._rest()

    def watch_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sets the parameters whose gradients are exchanged."""
        self._order = [id(p) for p in parameters]
        self._ids = frozenset(self._order)

    def note_codecs(self, names: Iterable[str]) -> None:
        """Notes the names of the codecs of the parameters' gradients, in the order of the parameters."""
        if self._ids and not self._warned:
            pairs = zip(self._order, names, strict=True)
            self._onebit = {parameter for parameter, name in pairs if name == "onebit"}
            _watch(self)

    @property
    def missed(self) -> bool:
        """Whether this compressor has not exchanged anything since an optimizer stepped without it."""
        return not self.exchanged

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of an optimizer."""
        if self.exchanged:
            if not self._scaled and _updates(optimizer, self._ids):
                self._scaled = True
                if _is_step_of_a_scaler():
                    warnings.warn(_UNSCALED, UserWarning, stacklevel=2)
            if _updates(optimizer, self._onebit) and warn_of_onebit(optimizer):
                self._warned = True
            self._rest()
            return
        if self._missed or self._ranks() == 1:
            return
        if self._ids and not _updates(optimizer, self._ids):
            return
        if any(other.exchanged and self._shares(other) for other in tuple(_compressors)):
            return
        if not self._suspected:
            self._suspected = True
            self.suspect()
        if _has_gradients(optimizer, self._ids):
            self._missed = True
            self.dismiss()
            self.warn(f"a step of {type(optimizer).__name__} without one")

    def _rest(self) -> None:
        """Stops watching if there is nothing left to warn of."""
        if self._warned or (not self._onebit and (self._scaled or not self._ids)):
            _watchers.discard(self)

    def _shares(self, other: TorchUse) -> bool:
        """Whether another compressor may have some of the same parameters."""
        return not self._ids or not other._ids or not self._ids.isdisjoint(other._ids)


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
            _watch(self)

    def begin(self, last: Iterable[Changes]) -> None:
        """Looks for steps since the last exchange; called before an exchange's first gradient."""
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
            self._stepped = _updates(optimizer, self._ids)


def _note_none(parameter: torch.Tensor, anew: set[bool]) -> None:
    # The hook lives as long as the parameter: it must not hold a compressor, nor the parameter itself.
    own = weakref.ref(parameter)

    def note(_: torch.Tensor) -> None:
        held = own()
        if held is not None and held.grad is None:
            anew.add(True)

    parameter.register_hook(note)


_compressors: weakref.WeakSet[TorchUse] = weakref.WeakSet()
_watchers: weakref.WeakSet[TorchUse | Discarded] = weakref.WeakSet()


def _watch(watcher: TorchUse | Discarded) -> None:
    """Reports steps to a watcher as long as something else refers to the watcher."""
    _watch_optimizers()
    _watchers.add(watcher)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in tuple(_watchers):
        one.note(optimizer)


def _is_step_of_a_scaler() -> bool:
    """Whether an enabled GradScaler has called the optimizer whose step is under way."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


def _updates(optimizer: torch.optim.Optimizer, ids: Container[int]) -> bool:
    """Whether an optimizer has any of the parameters with the given ids."""
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _has_gradients(optimizer: torch.optim.Optimizer, ids: Container[int]) -> bool:
    """Whether an optimizer has a dense gradient with other numbers than zeros for one of the parameters."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if id(p) in ids)
    # A DTensor's own part: its methods would wait for other ranks.
    own = (
        getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads if grad is not None
    )
    return any(bool(grad.any()) for grad in own if not grad.is_sparse)
