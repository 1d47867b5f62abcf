"""Makes batches and their exchanges, and keeps what they have in common from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvd_compress.engine.batch import Batch, OwnerWork
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.encode_context import EncodeContext
from hvd_compress.engine.exchanges import exchange_of
from hvd_compress.engine.inquiry import Inquiry
from hvd_compress.engine.plan import BucketPlan
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.packing import Length, describe
from hvd_compress.exchanges.registry import Group
from hvd_compress.exchanges.routing import Route

_MOST_PLANS = 256
"""Kept at a time: where other gradients are missing in every step, their number would grow for ever."""

_MOST_BUCKETS = 1024
"""Whose messages' lengths are kept at a time, for the same reason."""


class BatchCache:
    """Makes the batches of one compressor.

    Args:
        encoder: what this rank encodes with.
        group: the ranks.
        owner_step: what owners of parts do with averages, or None.

    Attributes:
        comm: collectives among the ranks.
        owner_step: as given.
    """

    def __init__(
        self, encoder: EncodeContext, group: Group, owner_step: OwnerWork | None = None
    ) -> None:
        self.comm = Comm(group)
        self.owner_step = owner_step
        self._encoder = encoder
        self._group = group
        self._plans: dict[tuple[object, ...], BucketPlan] = {}
        self._lengths: dict[tuple[object, ...], dict[str, Length]] = {}

    def begin_step(self) -> None:
        """Called before a step's first gradient.

        Lengths are forgotten here and nowhere else: between steps all ranks have made the same batches.
        """
        if len(self._lengths) > _MOST_BUCKETS:
            self._lengths.clear()
            self._plans.clear()  # They hold lengths, too.

    def forget_plans(self) -> None:
        """Called when gradients are to travel in another way.

        Lengths stay. They are those of a bucket and its codecs, and a rank may call this alone.
        """
        self._plans.clear()

    def lengths(self) -> str:
        """What ranks know of the lengths of each other's messages, in a few characters, to be compared."""
        return describe(self._lengths)

    def make(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool] | None = None,
        *,
        encoded: bool = True,
    ) -> tuple[Batch, Exchanging]:
        """The batch of one bucket, and its exchange, which has not begun.

        Args:
            slots: the gradients' parameters; all take the same exchange.
            gradients: as for :class:`Batch`, all on one device.
            used: as for :class:`Batch`.
            encoded: whether they are encoded. Where not, owners step them as they are (the cold start of
                an owner step, which only ``two_shot`` has).
        """
        device = gradients[0].device
        key = (device, *(slot.index for slot in slots))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            lengths = self._lengths_of((slot, slot.route) for slot in slots)
            plan = self._plans[key] = BucketPlan(
                self._encoder, slots, self._group, gradients[0], lengths
            )
        batch = Batch(self._encoder, plan, gradients, used, self.owner_step, encoded=encoded)
        exchange = exchange_of(plan.exchange if encoded else "cold_start")
        return batch, exchange(batch, self.comm)

    def inquire(
        self, former: Sequence[tuple[Slot, Route]], gradients: Sequence[torch.Tensor]
    ) -> tuple[Inquiry, Exchanging]:
        """The same for what asks whether all ranks have changed how these gradients travel.

        Args:
            former: as for :class:`Inquiry`.
            gradients: as for :class:`Inquiry`.
        """
        lengths = self._lengths_of(former)
        inquiry = Inquiry(self._encoder, self._group, former, gradients, lengths)
        return inquiry, exchange_of(inquiry.plan.exchange)(inquiry, self.comm)

    def _lengths_of(self, routes: Iterable[tuple[Slot, Route]]) -> dict[str, Length]:
        """What is remembered of a bucket's messages."""
        key = tuple((slot.index, slot.shape, route.exchange, route.codec) for slot, route in routes)
        return self._lengths.setdefault(key, {})
