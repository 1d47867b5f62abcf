"""Makes batches and their exchanges, and keeps what they have in common from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.exchange.registry import Group
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common.batch import Batch, OwnerWork
from hvd_compress.torch_common.comm import Comm, Exchanging
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.exchanges import exchange_of
from hvd_compress.torch_common.inquiry import Inquiry
from hvd_compress.torch_common.plan import Plan
from hvd_compress.torch_common.slots import Slot

_MOST_PLANS = 256
"""Kept at a time: where other gradients are missing in every step, their number would grow for ever."""


class Batches:
    """Makes the batches of one compressor.

    Args:
        encoder: what this rank encodes with.
        group: the ranks.
        owner_step: what owners of parts do with averages, or None.

    Attributes:
        comm: collectives among the ranks.
        owner_step: as given.
    """

    def __init__(self, encoder: Encoder, group: Group, owner_step: OwnerWork | None = None) -> None:
        self.comm = Comm(group)
        self.owner_step = owner_step
        self._encoder = encoder
        self._group = group
        self._plans: dict[tuple[object, ...], Plan] = {}

    def forget_plans(self) -> None:
        """Called when gradients are to travel in another way."""
        self._plans.clear()

    def make(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool] | None = None,
    ) -> tuple[Batch, Exchanging]:
        """The batch of one bucket, and its exchange, which has not begun.

        Args:
            slots: the gradients' parameters; all take the same exchange.
            gradients: as for :class:`Batch`, all on one device.
            used: as for :class:`Batch`.
        """
        device = gradients[0].device
        key = (device, *(slot.index for slot in slots))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(self._encoder, slots, self._group, gradients[0])
        batch = Batch(self._encoder, plan, gradients, used, self.owner_step)
        return batch, exchange_of(plan.exchange)(batch, self.comm)

    def inquire(
        self, former: Sequence[tuple[Slot, Route]], gradients: Sequence[torch.Tensor]
    ) -> tuple[Inquiry, Exchanging]:
        """The same for what asks whether all ranks have changed how these gradients travel.

        Args:
            former: as for :class:`Inquiry`.
            gradients: as for :class:`Inquiry`.
        """
        inquiry = Inquiry(self._encoder, self._group, former, gradients)
        return inquiry, exchange_of(inquiry.plan.exchange)(inquiry, self.comm)
