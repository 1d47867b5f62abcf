"""Exchanges for which torchft chooses the ranks, and decides whether the result counts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvd_compress.ranks.errors import ExchangeError

_KEY = "hvd_compress.diloco.DiLoCo"
"""The key of the state, an empty one, that a manager sends to ranks that are behind."""


class RolledBackError(ExchangeError):
    """The manager has decided that an exchange does not count."""


class Quorums:
    """The quorums of a ``torchft.Manager``, one for each exchange.

    Args:
        manager: a manager that waits for each quorum (``use_async_quorum=False``).
        group: the process group that the manager was made with, such as a ``torchft.ProcessGroupGloo``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    def __init__(self, manager: Any, group: Any) -> None:
        asked = ("start_quorum", "should_commit", "report_error", "register_state_dict_fn")
        if not all(hasattr(manager, name) for name in asked):
            raise TypeError(
                f"DiLoCo.manager: expected a torchft.Manager, got {type(manager).__name__}"
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ValueError(
                "DiLoCo.manager: expected Manager(..., use_async_quorum=False), got one whose quorum is "
                "not waited for: a rank has to have the common parameters before it can take differences"
            )
        if not (hasattr(group, "configure") and hasattr(type(group), "parent")):
            raise ValueError(
                f"DiLoCo.compressor: expected the manager's process group, "
                f"Compressor(Int8(), process_group=torchft.ProcessGroupGloo()), got {type(group).__name__}"
            )
        self._manager = manager
        self._group = group
        self._asked = False
        # Ranks that are behind catch up as the group's ranks meet, and manager asks for some state.
        manager.register_state_dict_fn(_KEY, lambda state: None, dict)

    def begin(self) -> None:
        """Waits for a quorum."""
        self._asked = False
        self._manager.start_quorum()

    def check(self) -> None:
        """Raises the error of the quorum, if there is one.

        Raises:
            ExchangeError: this rank is a spare.
            Exception: the ranks could not connect, or this rank got no state.
        """
        failed = self._manager.errored()
        if failed is not None:
            raise failed.original_exception
        if not self._manager.is_participating():
            raise ExchangeError(
                "DiLoCo.manager: expected a rank that takes part in every quorum, got a spare: use "
                "WorldSizeMode.DYNAMIC"
            )

    @property
    def number(self) -> int:
        """The number of earlier exchanges that counted; the same for all ranks of the quorum."""
        return int(self._manager.current_step())

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the quorum; the same object as long as the ranks are the same."""
        group: dist.ProcessGroup = self._group.parent
        return group

    def commit(self) -> None:
        """Raises an error unless the exchange counts.

        Raises:
            RolledBackError: it does not.
        """
        self._asked = True
        if not self._manager.should_commit():
            raise RolledBackError("the manager has said that it does not count")

    def fail(self, error: Exception) -> None:
        """Reports that the exchange has failed on this rank; the next quorum gets new connections."""
        if not self._asked:
            self._manager.report_error(error)
            self._asked = True
            self._manager.should_commit()
