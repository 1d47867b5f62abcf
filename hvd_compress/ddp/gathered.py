"""The residuals of all ranks in one checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.ddp.compressor import Compressor
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.process_group.device_collectives import collectives_of, meeting_place
from hvd_compress.process_group.values import gather_states
from hvd_compress.ranks.errors import explained

_NOTE = (
    "GatheredState.state_dict() waits for all ranks: one of them has ended, or has not called it; call it "
    "on every rank, and leave the first rank's `if` around torch.save alone"
)

_log = logging.getLogger(__name__)


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
        if not dist.is_initialized():
            return {"ranks": []}
        state = self._compressor.state_dict()
        elements = sum(slot.count for slot in self._compressor._slots)
        with explained(_NOTE):
            states = gather_states(collectives_of(None, meeting_place(None)), state, elements)
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where all ranks stopped, with the same or another number; every rank has to call it.

        Args:
            state: the value of :meth:`state_dict` on the first rank, the same on every rank. If it is from
                a run of one process, it holds no residuals: these start at zero, and a log line says so.

        Raises:
            ValueError: the same as from the compressor's ``load_state_dict`` and ``load_resized``; or the
                state is that of a rank other than the first.
        """
        expect_state("GatheredState.load_state_dict", state)
        states = state.get("ranks")
        if states is None:
            raise ValueError(
                "GatheredState: expected the first rank's state, got that of another rank"
            )
        if not states or not dist.is_initialized():
            _log.warning(
                "the checkpoint or this run has no ranks: training starts without residuals"
            )
        elif len(states) == dist.get_world_size():
            self._compressor.load_state_dict(states[dist.get_rank()])
        else:
            self._compressor.load_resized(states)
