"""The part of ``Auto`` that is the same among the ranks of any process group."""

from __future__ import annotations

from collections.abc import Sequence

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

    def _needs_hosts(self) -> bool:
        return any(route.exchange == "hierarchical" for route in self._choices)

    def _bind(self) -> None:
        if not self._bound:
            super()._bind()
            self._plan()

    def _ways(self) -> tuple[Sequence[Route], int]:
        assert self._group.hosts is not None
        local = self._group.hosts.local
        flat = not 1 < local < self._size
        usable = [r for r in self._choices if not (flat and r.exchange == "hierarchical")]
        return usable, local

    def _between_steps(self) -> None:
        if self._planner is None or not self._use.exchanged:
            return
        if self._planner.due:
            self._agree()
        self._step_ended()

    def _wait_for(self, collective: Collective, name: str) -> torch.Tensor:
        result, work = self._collectives.start(collective)
        work.wait()
        return result
