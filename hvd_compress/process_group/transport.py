"""Collectives that carry messages between ranks while the caller waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of, meeting_place


class Transport(Protocol):
    """Collectives that the caller waits for, always among the same ranks.

    Attributes:
        rank: this rank's number.
        size: the number of ranks; at least 2 when the methods are called.
    """

    rank: int
    size: int

    def compare(self, settings: dict[str, Any], device: torch.device) -> Callable[[], None]:
        """Starts a comparison of the ranks' settings for the next exchange.

        Args:
            settings: this rank's settings, JSON-serializable.
            device: the device of the tensors that will be sent.

        Returns:
            A function that waits for the result, and raises an ``ExchangeError`` on every rank if settings
            differ.
        """
        ...

    def run(self, collective: Collective, name: str) -> torch.Tensor:
        """Runs a collective and returns its result, as :class:`Collective` describes it.

        Args:
            collective: an ``all_gather`` or an ``all_to_all``.
            name: a name of the collective, the same on every rank.
        """
        ...


class ProcessGroupTransport:
    """Implements :class:`Transport` among the ranks of a ``torch.distributed`` process group.

    CPU tensors are sent in a new process group of the same ranks, so that the order of these collectives
    does not depend on the order of others, such as DDP's.

    Args:
        process_group: the ranks; None is the default group.

    Raises:
        ExchangeError: there is no process group, or this rank is not in it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        ranks = Collectives(process_group)
        self.rank, self.size = ranks.rank, ranks.size
        self._process_group = process_group
        self._by_device: dict[torch.device, Collectives] = {}

    def compare(self, settings: dict[str, Any], device: torch.device) -> Callable[[], None]:
        # Values can meet on any device that the group has a backend for.
        place = meeting_place(self._process_group) if device.type == "cpu" else device
        return Agreement(self._collectives(place), settings).settle

    def run(self, collective: Collective, name: str) -> torch.Tensor:
        result, work = self._collectives(collective.message.device).start(collective)
        work.wait()
        return result

    def _collectives(self, device: torch.device) -> Collectives:
        if device not in self._by_device:
            shared = collectives_of(self._process_group, device)
            self._by_device[device] = shared.among(range(self.size))
        return self._by_device[device]
