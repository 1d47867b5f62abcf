"""Has every rank changed how gradients travel? Asked in messages as ranks without a change expect them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_compress.engine.batch import Batch, change_of_some
from hvd_compress.engine.encode_context import EncodeContext
from hvd_compress.engine.plan import BucketPlan, Table
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.layout import CHANGED
from hvd_compress.exchanges.packing import Length
from hvd_compress.exchanges.registry import Group
from hvd_compress.exchanges.routing import Route


class Inquiry(Batch):
    """A bucket that goes through its former exchange with zeros in the place of payloads.

    Messages of another length would bring down the ranks that have not changed how gradients travel. Those
    find zeros, and raise an error, as where a rank fails; flags say what the zeros mean. Where the flags of
    all ranks say so, no gradient has been sent, and the ranks can go on in the new way.

    Args:
        encoder: as for :class:`Batch`.
        group: the ranks.
        former: each gradient's parameter, and how its gradients have travelled so far.
        gradients: as for :class:`Batch`; they are left alone.
        lengths: as for :class:`BucketPlan`, of the former way.
    """

    encodes = False

    def __init__(
        self,
        encoder: EncodeContext,
        group: Group,
        former: Sequence[tuple[Slot, Route]],
        gradients: Sequence[torch.Tensor],
        lengths: dict[str, Length],
    ) -> None:
        slots = [
            replace(slot, route=route, residual=None, next_residual=None, owned=None)
            for slot, route in former
        ]
        plan = BucketPlan(encoder, slots, group, gradients[0], lengths)
        super().__init__(encoder, plan, [torch.zeros_like(one) for one in gradients])
        self._senders: int | None = None

    def check(self) -> None:
        """Called at the exchange's end.

        Raises:
            ExchangeError: some ranks have changed nothing.
        """
        assert self._flags is not None
        changed = (self._flags[:, : len(self.plan.slots)] == CHANGED).all(1).tolist()
        if self._senders or not all(changed):
            raise change_of_some(changed)

    def guard(
        self, work: Callable[[], torch.Tensor], size: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        return work()

    def average(self, table: Table, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return []

    def count_senders(self, counted: int) -> None:
        self._senders = counted

    def write_flags(self, flags: torch.Tensor) -> None:
        flags[: len(self.plan.slots)] = CHANGED

    def _encode(self, table: Table, *work: Any) -> torch.Tensor:
        layout = table.layout
        message = torch.zeros(layout.size, dtype=torch.uint8, device=self.flats[0].device)
        self.write_flags(message[layout.flags :])
        return message
