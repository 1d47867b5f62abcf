"""Makes batches and their exchanges, and keeps the data that they share from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvd_compress.engine.batch import Batch, OwnerWork
from hvd_compress.engine.cold_start import cold_start
from hvd_compress.engine.comm import Comm, Exchanging
from hvd_compress.engine.encode_context import EncodeContext
from hvd_compress.engine.inquiry import Inquiry
from hvd_compress.engine.plan import BucketPlan
from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges.base import Group
from hvd_compress.exchanges.packing import Length, describe
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import Route

_MOST_PLANS = 256
"""The most plans to keep: with other gradients missing in each step, their number would be unlimited."""

_MOST_BUCKETS = 1024
"""The most buckets whose message lengths are kept, for the same reason."""


class BatchCache:
    """Makes the batches of one compressor.

    Args:
        encoder: the kernels, the seed and the loss scale of this rank.
        group: the ranks.
        owner_step: changes averages on the owners of parts; None for no change.

    Attributes:
        comm: the collectives among the ranks.
        owner_step: the argument of that name.
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
        """Forgets lengths if there are too many; called before a step's first gradient.

        Lengths are forgotten nowhere else: between steps, all ranks have made the same batches.
        """
        if len(self._lengths) > _MOST_BUCKETS:
            self._lengths.clear()
            self._plans.clear()  # They hold lengths, too.

    def forget_plans(self) -> None:
        """Forgets all plans; called when the routes of gradients change.

        Lengths are kept: they belong to a bucket and its codecs, and a rank may call this method alone.
        """
        self._plans.clear()

    def lengths(self) -> str:
        """A short hash of the known lengths of the ranks' messages, which ranks compare."""
        return describe(self._lengths)

    def make(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool] | None = None,
        *,
        encoded: bool = True,
    ) -> tuple[Batch, Exchanging]:
        """Makes the batch of one bucket, and its exchange, which has not begun.

        Args:
            slots: the gradients' slots; all use the same exchange.
            gradients: the same as in :class:`Batch`, all on one device.
            used: the same as in :class:`Batch`.
            encoded: whether gradients are encoded. If not, owners apply the owner step to averages of
                uncompressed gradients (the cold start of an owner step, which only ``two_shot`` has).
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
        run = EXCHANGES[plan.exchange].run if encoded else cold_start
        return batch, run(batch, self.comm)

    def inquire(
        self, former: Sequence[tuple[Slot, Route]], gradients: Sequence[torch.Tensor]
    ) -> tuple[Inquiry, Exchanging]:
        """Makes an inquiry about a change of these gradients' routes on all ranks, and its exchange.

        Args:
            former: the same as in :class:`Inquiry`.
            gradients: the same as in :class:`Inquiry`.
        """
        lengths = self._lengths_of(former)
        inquiry = Inquiry(self._encoder, self._group, former, gradients, lengths)
        return inquiry, EXCHANGES[inquiry.plan.exchange].run(inquiry, self.comm)

    def _lengths_of(self, routes: Iterable[tuple[Slot, Route]]) -> dict[str, Length]:
        """The lengths of a bucket's messages, by name."""
        key = tuple((slot.index, slot.shape, route.exchange, route.codec) for slot, route in routes)
        return self._lengths.setdefault(key, {})
