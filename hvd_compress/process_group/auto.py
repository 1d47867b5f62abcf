"""The part of ``Auto`` that is the same among the ranks of any process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_compress.engine.auto import Planning
from hvd_compress.exchanges.comm import Collective
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.compressor import ProcessGroupCompressor

DEFAULT_EXCHANGES = ("allgather", "two_shot")
"""``"hierarchical"`` has to be requested: the environment says on which host a rank is, but not whether all
hosts have the same number of ranks."""


class GroupPlanning(Planning, ProcessGroupCompressor):
    """The base of each ``Auto`` that sends by torch.distributed, listed before the frontend's compressor.

    Attributes:
        _choices: the routes that the user allows; set before the compressor is made.
    """

    _choices: Sequence[Route]

    def __getstate__(self) -> dict[str, Any]:
        choices, plan = self._choices, self._plan_state()
        return {**super().__getstate__(), "choices": choices, "planner": plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._choices, self._saved_plan = state["choices"], state["planner"]
        super().__setstate__(state)

    def _needs_hosts(self) -> bool:
        return any(route.exchange == "hierarchical" for route in self._choices)

    def _bind(self) -> None:
        if not self._ranks.joined:
            super()._bind()
            self._plan()

    def _ways(self) -> tuple[Sequence[Route], int]:
        group = self._ranks.group
        assert group.hosts is not None
        local = group.hosts.local
        flat = not 1 < local < group.size
        usable = [r for r in self._choices if not (flat and r.exchange == "hierarchical")]
        return usable, local

    def _between_steps(self) -> None:
        if self._planner is None or not self._use.exchanged:
            return
        if self._planner.due:
            self._agree()
        self._step_ended()

    def _wait_for(self, collective: Collective, name: str) -> torch.Tensor:
        result, work = self._ranks.collectives.start(collective)
        work.wait()
        return result
