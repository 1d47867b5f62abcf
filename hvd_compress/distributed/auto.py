"""The compressor that measures and decides by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs import NoCompression
from hvd_compress.codecs.calls import guard
from hvd_compress.distributed.compressor import Accept, Compressor, Work
from hvd_compress.distributed.keys import pairs
from hvd_compress.distributed.rebinding import Meeting
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.planned import position_of
from hvd_compress.exchanges.routing import CodecLike
from hvd_compress.planner.choices import DEFAULT_CODECS, allowed
from hvd_compress.process_group.auto import DEFAULT_EXCHANGES, GroupPlanning


@guard
class Auto(GroupPlanning, Compressor):
    """Measures the network and the codecs, and sends each tensor in the way that makes steps shortest.

    For how it decides, see :class:`~hvd_compress.engine.auto.Planning` and ``docs/planner.md``. A step is
    all calls of ``all_reduce`` until a key comes again: one call, if it always has the same keys, or
    several. There is one plan for all keys, which stays until the network changes or a call has a new key.

    Ranks measure, and change plans, at the beginning of the call in which a key comes again. While no plan
    is decided, that call waits for the other ranks and for all earlier calls, even with ``async_op=True``.

    Args:
        codecs, exchanges: see :class:`~hvd_compress.engine.auto.Planning`.
        options: ``threshold``, ``exclude``, ``warmup_steps``, ``seed``, ``process_group``, ``grad_scaler``
            and ``threads``, as for :class:`Compressor`.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
    """

    def __init__(
        self,
        *,
        codecs: Sequence[CodecLike] = DEFAULT_CODECS,
        exchanges: Sequence[str] = DEFAULT_EXCHANGES,
        **options: Any,
    ) -> None:
        self._choices = allowed(codecs, exchanges)
        super().__init__(NoCompression(), **options)

    @torch.no_grad()
    def reduce(
        self,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        key: str | Sequence[str],
        op: Any,
        group: dist.ProcessGroup | None = None,
        accept: Accept | None = None,
        device: torch.device | None = None,
    ) -> Work:
        """The same as :meth:`Compressor.reduce`; first measures or changes plans if a step has ended."""
        try:
            tensor, key = pairs(tensor, key)
        except (TypeError, ValueError):
            pass  # The call itself tells the other ranks.
        else:
            if not self.keys.in_step.isdisjoint(key):
                self._between_steps()
                self.keys.in_step.clear()
            self.keys.in_step.update(key)
        return super().reduce(tensor, key, op, group, accept, device)

    def rebind_to(self, meeting: Meeting) -> None:
        """The same as :meth:`Compressor.rebind_to`; then plans anew in the next call."""
        super().rebind_to(meeting)
        self.keys.in_step.clear()
        self._saved_plan = self._planned = None

    def _plan(self) -> None:
        if (
            self._ranks.comparisons is None
        ):  # The first call tells the device, and perhaps more keys.
            self._planned = None
            return
        for slot in self._slots:
            device = self._ranks.device
            if slot.parameter.device != device:  # A loaded state's slot.
                one = slot.parameter.new_empty((), device=device)
                slot.parameter = one.expand(slot.shape)
        super()._plan()

    def _slots_for(self, tensors: Sequence[torch.Tensor], keys: Sequence[str]) -> list[Slot]:
        routed = len(self.keys.routed)
        slots = super()._slots_for(tensors, keys)
        if self._planned is None or not self._planned.own_choices.keys() >= set(keys):
            self._plan()
        elif len(self.keys.routed) > routed:
            self._planned.apply(self._planned.planner.plan)
        return slots

    def _agree(self) -> None:
        """Waits for the calls under way, and for the other ranks."""
        self._ranks.finish()
        assert self._planned is not None
        tensors = list(self._planned.own_choices)
        self._ranks.compare({**position_of(self._planned), "tensors": tensors})
