"""Asks whether every rank has changed its routes, in messages that ranks without a change expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.failures import change_of_some
from hvd_compress.engine.plan import Table
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.layout import CHANGED
from hvd_compress.exchanges.routing import Route


class Inquiry(Batch):
    """A bucket that uses its former exchange, with zeros in place of payloads.

    Messages of another length would crash the ranks that have not changed their routes. These ranks find
    zeros and raise an error, as they do when a rank has failed; flags tell them why there are zeros. If the
    flags of all ranks announce a change, no gradient has been sent, and the ranks can use their new routes.

    Args:
        batches: those of the compressor.
        former: each gradient's slot, and the route of its gradients until now.
        gradients: the same as in :class:`Batch`, but not changed.
    """

    encodes = False

    def __init__(
        self,
        batches: Batches,
        former: Sequence[tuple[Slot, Route]],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        slots = [
            replace(slot, route=route, residual=None, next_residual=None, owned=None, factor=None)
            for slot, route in former
        ]
        plan = batches.plan(slots, gradients[0])
        super().__init__(plan, [torch.zeros_like(one) for one in gradients])
        self._senders: int | None = None

    def check(self) -> None:
        """Checks at the end of the exchange that every rank has changed its routes.

        Raises:
            ExchangeError: some ranks have not changed their routes.
        """
        assert self._flags is not None
        changed = (self._flags[:, : len(self.plan.slots)] == CHANGED).all(1).tolist()
        if self._senders or not all(changed):
            raise change_of_some(changed)

    def guard(
        self, work: Callable[[], torch.Tensor], size: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Runs ``work`` without a guard: an inquiry computes nothing that can fail on one rank only."""
        return work()

    def parts_to_owners(self) -> tuple[torch.Tensor, list[int]]:
        """The same as :meth:`Batch.parts_to_owners`, of NaN: an owner would add zeros as gradients."""
        parts, sizes = super().parts_to_owners()
        return parts.fill_(255), sizes

    def average(self, table: Table, rows: torch.Tensor, first: int = 0) -> Sequence[torch.Tensor]:
        """Computes no averages: an inquiry sends zeros."""
        return []

    def count_senders(self, counted: int | torch.Tensor, what: str = "levels") -> None:
        """Notes how many ranks have sent numbers to add; :meth:`check` expects none."""
        self._senders = int(counted)

    def write_flags(self, flags: torch.Tensor) -> None:
        """Marks every gradient as one whose route this rank has changed."""
        flags[: len(self.plan.slots)] = CHANGED

    def _encode(self, table: Table, *work: Any) -> torch.Tensor:
        layout = table.layout
        message = torch.zeros(layout.size, dtype=torch.uint8, device=self.flats[0].device)
        self.write_flags(message[layout.flags :])
        return message
