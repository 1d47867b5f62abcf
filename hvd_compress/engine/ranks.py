"""The ranks among which a compressor sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hvd_compress.engine.parameters import Slot
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError


class Ranks(ABC):
    """The ranks among which a compressor sends; every frontend has a class of its own.

    Attributes:
        group: the ranks, and this rank's place among them; known once this rank has joined them.
        resets: the number of calls of ``reset()`` since the ranks have compared their configurations last.
    """

    group: Group
    idle_after: ClassVar[str] = "a backward pass that has come to its end"
    """The end of every exchange, as text for :meth:`expect_idle`."""
    resets = 0

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether gradients are being exchanged."""

    def expect_idle(self, what: str) -> None:
        """Raises ``ExchangeError`` if gradients are being exchanged."""
        if self.busy:
            raise ExchangeError(
                f"{what}: expected no exchange in progress, got one: residuals and positions belong to a "
                f"whole exchange; call it after {self.idle_after}"
            )

    @staticmethod
    @abstractmethod
    def of_job() -> int:
        """The number of ranks that train, as far as this process knows; 1 after the job's end."""

    @abstractmethod
    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` if these ranks cannot exchange a parameter's gradients by a route."""

    @abstractmethod
    def configuration(self, *, hierarchical: bool) -> dict[str, Any]:
        """The part of the configuration that ranks compare which the frontend knows.

        Args:
            hierarchical: whether the exchange of some gradient distinguishes hosts.
        """

    @abstractmethod
    def forget_agreement(self) -> None:
        """Makes the ranks compare their configurations again."""

    @abstractmethod
    def usable(self, routes: Sequence[Route]) -> tuple[Sequence[Route], int]:
        """The routes that can be used, and the number of ranks on each host; the same on every rank."""

    @abstractmethod
    def result_of(self, collective: Collective, name: str) -> torch.Tensor:
        """Waits for a collective of all ranks to end, and returns its result."""

    @property
    def first(self) -> bool:
        """Whether this is the first of the ranks that plan together."""
        return self.group.rank == 0

    def slowest(self, table: torch.Tensor) -> torch.Tensor:
        """The sums of the ranks that exchange, or the largest ones if several groups plan together."""
        return table

    def meet(self, call: str) -> None:
        """Waits for the other ranks in a call that needs a whole exchange before it.

        For errors, see :meth:`expect_idle` and :meth:`wait`.
        """
        self.expect_idle(call)
        self.wait(call)

    @abstractmethod
    def wait(self, call: str, **arguments: str) -> None:
        """Waits for the other ranks to make the same call, before it changes anything on any of them.

        Ranks that cannot meet do not wait: they compare their settings in the next step.

        Raises:
            ExchangeError: not all ranks make the same call; nothing is changed then.
        """
