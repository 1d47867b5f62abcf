"""The buckets in which gradients travel, filled as hooks deliver gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from hvd_compress.engine.slots import Slot
from hvd_compress.exchanges import buckets


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        name: the name of the bucket, the same on every rank.
        number: its position among the step's buckets, the same on every rank.
        wanted: the number of gradients that complete the bucket.
        gradients: the gradients that have arrived, by slot.
    """

    name: str
    number: int
    wanted: int
    gradients: dict[Slot, torch.Tensor] = field(default_factory=dict)

    def sorted(
        self, which: Callable[[Slot], bool] = lambda slot: True
    ) -> tuple[tuple[Slot, ...], list[torch.Tensor]]:
        """Slots and gradients of the slots that ``which`` selects, in the order of the parameters."""
        slots = tuple(sorted(filter(which, self.gradients), key=lambda slot: slot.index))
        return slots, [self.gradients[slot] for slot in slots]


class Buckets:
    """The buckets of a step.

    They are composed of the parameters that had a gradient in the last step. Horovod's optimizer exchanges
    the same gradients on every rank, so the buckets are the same everywhere. A gradient that was not in the
    last step is a latecomer, and has its own bucket.
    """

    def __init__(self) -> None:
        self._buckets: dict[Slot, Bucket] = {}
        self._waiting: dict[str, Bucket] = {}
        self._arrived: set[Slot] = set()
        self._count = 0

    def plan(self, slots: Iterable[Slot]) -> None:
        """Composes new buckets of gradients that will be encoded."""
        self._buckets = {}
        self._count = 0
        kinds: dict[tuple[str, torch.device, torch.dtype], list[Slot]] = {}
        for slot in slots:
            parameter = slot.parameter
            kind = slot.route.exchange, parameter.device, parameter.dtype
            kinds.setdefault(kind, []).append(slot)
        for members in kinds.values():
            by_index = {slot.index: slot for slot in members}
            for numbers in buckets.compose((slot.index, slot.count) for slot in members):
                bucket = Bucket(f"bucket {self._count}", self._count, len(numbers))
                self._buckets.update({by_index[number]: bucket for number in numbers})
                self._count += 1

    def add(self, slot: Slot, gradient: torch.Tensor) -> Bucket | None:
        """Adds a gradient; returns its bucket if that is complete now."""
        self._arrived.add(slot)
        planned = self._buckets.get(slot)
        if planned is None:
            planned = Bucket(f"latecomer {slot.index}", self._count + slot.index, 1)
        bucket = self._waiting.setdefault(planned.name, planned)
        bucket.gradients[slot] = gradient
        if len(bucket.gradients) < bucket.wanted:
            return None
        return self._taken(bucket)

    def rest(self) -> list[Bucket]:
        """The buckets that wait for gradients which do not arrive in this step."""
        return [self._taken(self._waiting[name]) for name in sorted(self._waiting)]

    def end(self) -> set[Slot] | None:
        """Ends a step; returns the parameters whose gradients arrived if they are not the planned ones."""
        arrived, self._arrived = self._arrived, set()
        return None if arrived == self._buckets.keys() else arrived

    def _taken(self, bucket: Bucket) -> Bucket:
        del self._waiting[bucket.name]
        taken = Bucket(bucket.name, bucket.number, bucket.wanted, bucket.gradients)
        bucket.gradients = {}
        return taken
