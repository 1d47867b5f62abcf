"""Reports the steps of all optimizers in the process to watchers."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """An object that is told about the steps of optimizers."""

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of an optimizer, whatever its parameters are."""


def watch(watcher: Watcher) -> None:
    """Reports steps to a watcher as long as something else refers to the watcher."""
    _watch_optimizers()
    _watchers.add(watcher)


def updates(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    """Whether an optimizer has any of the parameters with the given ids."""
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in tuple(_watchers):
        one.note(optimizer)
