"""The transport of a parallel group's messages with Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_compress.exchanges.comm import Collective
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.names import distinct
from hvd_compress.torch.collectives import HorovodCollectives

if TYPE_CHECKING:
    # Where Horovod is missing, the import of hvd_compress.torch says what to install.
    import horovod.torch as hvd


class HorovodTransport:
    """Implements :class:`~hvd_compress.process_group.transport.Transport` among Horovod's ranks.

    All ranks must make their transports in the same order: a transport's number is part of the names of its
    collectives.

    Args:
        process_set: the ranks; None means all ranks.

    Raises:
        ExchangeError: Horovod is not initialized; the process set is not registered, or does not contain
            this rank.
    """

    def __init__(self, process_set: hvd.ProcessSet | None = None) -> None:
        self._collectives = HorovodCollectives(process_set, distinct("hvd_compress.papers"))
        self.rank, self.size = self._collectives.place
        if self.rank < 0:
            raise ExchangeError("expected a process set with this rank in it, got one without")

    def compare(self, settings: dict[str, Any], device: torch.device) -> Callable[[], None]:
        """Starts to compare settings; returns a function that raises an error if ranks differ."""
        handle = self._collectives.send_settings(settings, "settings")
        return lambda: self._collectives.check_settings(handle)

    def run(self, collective: Collective, name: str) -> torch.Tensor:
        """Runs a collective, and returns its result."""
        return self._collectives.start(collective, name).wait()
