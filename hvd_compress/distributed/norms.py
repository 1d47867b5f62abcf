"""The norms of the ranks' residuals, for the log when a rank is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from hvd_compress.process_group.collectives import Collectives


class Norms:
    """The norms of all ranks' residuals, exchanged without waiting.

    Args:
        ranks: the collectives among the ranks, in a group that nothing else uses.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._shares = 0
        self._early = False  # Whether it was shared before an exchange, and not after it.
        # The number of a share, and what ranks told in it.
        self._latest = 0, torch.empty(0, dtype=torch.float64, device="cpu")

    @property
    def complete(self) -> bool:
        """Whether the norms of all ranks have arrived since the last exchange."""
        return 0 < self._shares == self._latest[0] and not self._early

    def share(self, norm: float, *, early: bool = False) -> None:
        """Sends this rank's norm to the other ranks; all ranks call it equally often.

        Args:
            norm: the norm of this rank's residuals.
            early: whether the norm is sent before an exchange.
        """
        self._shares += 1
        self._early = early
        share = self._shares

        def keep(error: Exception | None) -> None:
            if error is None:
                self._latest = share, rows.view(-1)

        own = torch.tensor([norm], dtype=torch.float64, device=self._ranks.device)
        # A rank that is lost is told of by the next exchange.
        with contextlib.suppress(RuntimeError):
            rows, work = self._ranks.all_gather(own)
            self._ranks.when_over(work, keep)

    def of(self, ranks: Iterable[int]) -> str:
        """The norm of the residuals of some ranks together, in words."""
        share, norms = self._latest
        if not share:
            return "unknown"
        together = norms.square()[list(ranks)].sum().sqrt().item()
        return f"{together:.6g}" + ("" if self.complete else " before the last exchange")

    def close(self) -> None:
        """Closes this rank's connections in the group."""
        self._ranks.close()
