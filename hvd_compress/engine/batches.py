"""Makes the batches of a compressor, and keeps the plans of its buckets from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_compress.engine.batch import Batch
from hvd_compress.engine.cold_start import cold_start
from hvd_compress.engine.levels import LevelBatch
from hvd_compress.engine.low_rank import LowRankBatch
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import BucketPlan, Common
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Comm, Exchanging
from hvd_compress.exchanges.packing import Length, describe
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.ranks.counters import Counters

_MOST_PLANS = 256
"""The most plans to keep: with other gradients missing in each step, their number would be unlimited."""

_MOST_BUCKETS = 1024
"""The most buckets whose message lengths are kept, for the same reason."""


class Batches:
    """Makes the batches of one compressor, and keeps their plans.

    Args:
        common: the settings that the plans share.

    Attributes:
        common: the argument of that name.
        comm: the collectives among the ranks.
    """

    def __init__(self, common: Common) -> None:
        self.common = common
        self.comm = Comm(common.group)
        self._plans: dict[tuple[object, ...], BucketPlan] = {}
        # A device may have met errors with them, which their kernels explain in a later step.
        self._forgotten: deque[BucketPlan] = deque(maxlen=_MOST_PLANS)
        self._lengths: dict[tuple[object, ...], dict[str, Length]] = {}

    def begin_step(self) -> None:
        """Forgets lengths if there are too many; called before a step's first gradient.

        Lengths are forgotten nowhere else: between steps, all ranks have made the same batches.
        """
        if len(self._lengths) > _MOST_BUCKETS:
            self._lengths.clear()
            self.forget_plans()  # They hold lengths, too.

    def forget_plans(self) -> None:
        """Forgets all plans; called when the routes of gradients change.

        Lengths are kept: they belong to a bucket and its codecs, and a rank may call this method alone.
        """
        self._forgotten.extend(self._plans.values())
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
                self.forget_plans()
            # The lengths of messages outlive a plan.
            same = tuple((s.index, s.shape, s.route.exchange, s.route.codec) for s in slots)
            lengths = self._lengths.setdefault(same, {})
            plan = self._plans[key] = BucketPlan(self.common, slots, gradients[0], lengths)
        batch = Batch(plan, gradients, used, encoded=encoded)
        if not encoded:
            return batch, cold_start(batch, self.comm)
        form = _SENT_AS.get(plan.exchange)
        return batch, EXCHANGES[plan.exchange].run(form(batch) if form else batch, self.comm)

    def begin(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[torch.Tensor],
        used: Sequence[bool],
        counters: Counters,
        *,
        encoded: bool = True,
        name: str = "",
        number: int = 0,
    ) -> Run:
        """Encodes one bucket, and begins its exchange.

        Args:
            slots, gradients, used, encoded: see :meth:`make`.
            counters: the counters, to which the encoding is added.
            name, number: see :class:`Run`.
        """
        batch, exchanging = self.make(slots, gradients, used, encoded=encoded)
        exchange = EXCHANGES[batch.plan.exchange]
        remainders = exchange.remainders if batch.plan.packed else ()
        run = Run(exchanging, batch, exchange.stages, remainders, name=name, number=number)
        batch.count_encoding(counters)
        return run


_SENT_AS: dict[str, Callable[[Batch], Any]] = {"integer_sum": LevelBatch, "low_rank": LowRankBatch}
"""The forms of a batch for exchanges that send no payloads, by exchange."""
