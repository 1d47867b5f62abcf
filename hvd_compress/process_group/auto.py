"""The part of ``Auto`` that is the same among the ranks of any process group."""

from __future__ import annotations

import logging
from typing import Any

from hvd_compress.engine.auto import Planning
from hvd_compress.engine.planned import state_of
from hvd_compress.process_group.compressor import ProcessGroupCompressor

DEFAULT_EXCHANGES = ("allgather", "two_shot")
"""``"hierarchical"`` has to be requested: the environment says on which host a rank is, but not whether all
hosts have the same number of ranks."""


class GroupPlanning(Planning, ProcessGroupCompressor):
    """The base of each ``Auto`` over torch.distributed, listed before the frontend's compressor."""

    def __getstate__(self) -> dict[str, Any]:
        plan = state_of(self._planned, self._saved_plan)
        return {**super().__getstate__(), "choices": self._choices, "planner": plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._choices, self._saved_plan = state["choices"], state["planner"]
        super().__setstate__(state)

    def _bind(self) -> None:
        if not self._ranks.joined:
            super()._bind()
            self._plan()

    def _between_steps(self) -> None:
        if self._planned is not None and self._use.exchanged:
            if self._planned.planner.due:
                self._agree()
            self._planned.end_step(logging.getLogger(type(self).__module__))
