"""The residuals of all ranks in one checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.private import job_store
from hvd_compress.process_group.values import gather_states, together
from hvd_compress.ranks.errors import explained

_NOTE = (
    "GatheredState.state_dict() waits for all ranks: one of them has ended, or has not called it; call it "
    "on every rank, and leave the first rank's `if` around torch.save alone"
)

_log = logging.getLogger(__name__)

_numbers = itertools.count()
"""The numbers of the calls of :func:`state_unless_interrupted`, the same on every rank."""


class GatheredState:
    """A compressor's states on all ranks, for checkpoints that the first rank writes alone.

    The state of each rank is as large as the model in float32. Every rank has to call both methods; only
    ``torch.save`` belongs into an ``if`` for the first rank: a rank that calls a method alone waits for the
    others. Without a process group, there are no residuals to save.

    Args:
        compressor: this rank's compressor.

    Raises:
        TypeError: the argument is not a compressor.
    """

    def __init__(self, compressor: Compressor) -> None:
        expect_instance("GatheredState", compressor, Compressor, "GatheredState({})")
        self._compressor = compressor

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks on the first one, nothing on the others; every rank has to call it."""
        return self._gather(None)

    def _gather(self, given_up: Callable[[], bool] | None) -> dict[str, Any]:
        if not dist.is_initialized():
            return {"ranks": []}
        state = self._compressor.state_dict()
        elements = sum(slot.count for slot in self._compressor._slots)
        with explained(_NOTE):
            ranks = collectives_of(None)
            states = gather_states(ranks, state, elements, given_up)
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where all ranks stopped, with the same or another number; every rank has to call it.

        Args:
            state: the value of :meth:`state_dict` on the first rank, the same on every rank. If it is from
                a run of one process, it holds no residuals: these start at zero (``reset()``), and a log
                line says so.

        Raises:
            TypeError, ValueError: the same as from the compressor's ``load_state_dict`` and
                ``load_resized``; or the state is that of a rank other than the first.
            ExchangeError: another rank has raised an error.
        """
        with together(None):
            self._compressor._ranks.wait("GatheredState.load_state_dict")
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        expect_state("GatheredState.load_state_dict", state, ["ranks"] if state else [])
        states = state.get("ranks")
        if states is None:
            raise ValueError(
                "GatheredState: expected the first rank's state, got that of another rank"
            )
        if not states or not dist.is_initialized():
            _log.warning(
                "the checkpoint has no residuals, or this run no ranks: training starts without residuals"
            )
            self._compressor.reset()
        elif len(states) == dist.get_world_size():
            self._compressor.load_state_dict(states[dist.get_rank()])
        else:
            self._compressor.load_resized(states)


def state_unless_interrupted(compressor: Compressor, patience: float | None) -> dict[str, Any]:
    """The value of :meth:`GatheredState.state_dict`; without residuals if a rank has none to give.

    That is a rank in the middle of an exchange, as after an error within a backward pass. It does not
    gather, and does not wait: its next collectives may not be those of the others, which learn of it from
    the job's store.

    Args:
        patience: after an error, the time in seconds to wait for ranks that may never come; then errors of
            this function's own are logged and not raised. None without an error: a rank waits as long as
            the process group does.
    """
    nothing: dict[str, Any] = {"ranks": []}
    if not dist.is_initialized():
        return nothing
    key = f"hvd_compress/no_residuals/{next(_numbers)}"
    end = None if patience is None else time.monotonic() + patience
    store = job_store()

    def given_up() -> bool:
        late = end is not None and time.monotonic() > end
        return late or store.check([key])

    if compressor._ranks.busy:
        reason = "an exchange of gradients was interrupted on this rank"
    else:
        try:
            if not store.check([key]):
                return GatheredState(compressor)._gather(given_up)
            reason = "an exchange of gradients was interrupted on another rank"
        except Exception as error:
            if end is None and not store.check([key]):
                raise
            reason = f"{type(error).__name__}: {error}"
    # The store may have ended with the first rank, which alone writes the file.
    with contextlib.suppress(Exception):
        store.set(key, "")
    _log.warning(
        "a checkpoint is saved without residuals (%s): training that resumes from it starts without them",
        reason,
    )
    return nothing
