"""States in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.process_group.values import state_bytes, state_from, together

_CHECKPOINTS = "torch.distributed.checkpoint."

_under_own_names: ContextVar[bool] = ContextVar("_under_own_names", default=False)


@contextlib.contextmanager
def under_own_names() -> Iterator[None]:
    """Allows ``state_dict()`` while a checkpoint is made: the caller saves each rank's state by itself."""
    token = _under_own_names.set(True)
    try:
        yield
    finally:
        _under_own_names.reset(token)


def expect_own_names(who: str) -> None:
    """Raises ``TypeError`` if torch.distributed.checkpoint would keep one rank's state for all ranks.

    It does so with what an object's ``state_dict()`` returns to it: tensors of the same name on several
    ranks are copies of each other there.
    """
    frame = None if _under_own_names.get() else inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_CHECKPOINTS):
            raise TypeError(
                f"{who}: expected RankStates(compressor) in a checkpoint of torch.distributed.checkpoint, "
                f"got the compressor or its state_dict(): the checkpoint would keep the residuals of one "
                f"rank for all; write {{'compressor': RankStates(compressor)}} to save and to load"
            )
        frame = frame.f_back


class RankStates:
    """The states of all ranks, each under the rank's number: ``dcp.save({"compressor": RankStates(c)})``.

    torch.distributed.checkpoint treats tensors with the same name on several ranks as copies of each other,
    which residuals are not. So each rank's state is saved as one object with its own name. Every rank has
    to save and load.

    Args:
        compressor: this rank's compressor, or another object with residuals, such as a ``DiLoCo``.
        saved_ranks: the number of ranks that saved the checkpoint to be loaded, if it differs from the
            current number.

    Raises:
        TypeError: the argument is something else.
    """

    def __init__(self, compressor: Any, saved_ranks: int | None = None) -> None:
        known = hasattr(compressor, "state_dict") and hasattr(compressor, "load_state_dict")
        if isinstance(compressor, type | torch.nn.Module | torch.optim.Optimizer) or not known:
            raise TypeError(
                f"RankStates: expected a compressor, got {compressor!r:.80}: write RankStates(compressor)"
            )
        self._compressor = compressor
        self._resized = saved_ranks is not None
        own = dist.get_rank() if dist.is_initialized() else 0
        ranks = [own] if saved_ranks is None else range(saved_ranks)
        self._names = [f"rank {rank}" for rank in ranks]

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; with ``saved_ranks``, under the names of all ranks to be loaded."""
        with under_own_names():
            state = state_bytes(self._compressor.state_dict())
        return dict.fromkeys(self._names, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the ranks stopped; every rank has to call it.

        Raises:
            TypeError, ValueError: the same as from the compressor's ``load_state_dict`` and
                ``load_resized``.
            ExchangeError: another rank has raised an error.
        """
        with together(None):
            states = [state_from(state[name]) for name in self._names]
        with together(None):
            if self._resized:
                self._compressor.load_resized(states)
            else:
                self._compressor.load_state_dict(states[0])
