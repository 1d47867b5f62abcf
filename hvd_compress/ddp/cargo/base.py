"""What an exchange is, and a bucket's encoded gradients on their way through the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvd_compress.codecs.base import round_up
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.slots import Owned, Slot

_ALIGNMENT = 16
"""Payloads are multiples of this; gathers of other sizes are slow on NCCL."""

Over = Callable[[Exception | None], None]
"""Called once, by any thread, when something is over: with what went wrong, or with None."""


@dataclass(eq=False)
class Item:
    """One gradient that is encoded.

    Attributes:
        slot: whose gradient.
        gradient: a view of the bucket, of the parameter's shape.
        used: whether this rank's backward pass came to it.
        original: the gradient, where it is also outside of the bucket.
        before: residuals of a gradient that this rank did not use, as they were: the rank's own, and that
            of the part that it owns.
    """

    slot: Slot
    gradient: torch.Tensor
    used: bool
    original: torch.Tensor | None = None
    before: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def remember(self) -> None:
        """Keeps the residuals as they are."""
        owned = self.slot.owned
        kept = (self.slot.residual, None if owned is None else owned.residual)
        first, second = (None if rest is None else rest.clone() for rest in kept)
        self.before = first, second

    def put_back(self) -> None:
        """Undoes what sending did to the residuals that :meth:`remember` has kept."""
        assert self.before is not None
        self.slot.residual = self.before[0]
        if self.slot.owned is not None:
            self.slot.owned.residual = self.before[1]


class Cargo(ABC):
    """The encoded gradients of one bucket. A byte for each travels with them: whether a rank used it.

    Attributes:
        items: the gradients.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    @abstractmethod
    def send(self, over: Over) -> None:
        """Starts its collectives, in the order of the buckets; returns at once."""

    @property
    @abstractmethod
    def nonfinite(self) -> bool:
        """Whether an Inf or a NaN was in a gradient that some rank encoded."""

    @property
    @abstractmethod
    def used(self) -> list[bool]:
        """For each gradient, whether any rank's backward pass came to it."""

    @abstractmethod
    def write(self, index: int) -> torch.Tensor:
        """Writes the ranks' average of one gradient over it.

        Returns:
            It, shape=(n,): a copy, where the gradient is not contiguous.

        Raises:
            PayloadError: a payload was altered on its way.
        """

    @abstractmethod
    def take_back(self, index: int, gradient: torch.Tensor | None) -> None:
        """Takes residuals back to what they were before one gradient was encoded.

        Args:
            index: of the gradient.
            gradient: its elements, shape=(n,), where the bucket does not hold them any more.
        """

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds what was sent and encoded to the counters; called when it has arrived."""

    def _flags(self) -> torch.Tensor:
        """The bytes that say which gradients this rank used."""
        flags = torch.zeros(round_up(len(self.items), _ALIGNMENT), dtype=torch.uint8)
        flags[: len(self.items)] = torch.tensor([item.used for item in self.items])
        return flags


class Exchange(ABC):
    """A way from every rank's gradients to their average on every rank, a bucket at a time.

    Attributes:
        collectives: the ranks.
        encoder: what this rank encodes with.
        keeps_residuals: whether ranks keep residuals of whole gradients, besides those of what they own.
    """

    keeps_residuals: ClassVar[bool] = True

    def __init__(self, collectives: Collectives, encoder: Encoder) -> None:
        self.collectives = collectives
        self.encoder = encoder

    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` where a parameter's gradients cannot go this way."""
        return

    def settings(self) -> dict[str, Any]:
        """What has to be the same on every rank, besides the routes."""
        return {}

    def owned(self, slot: Slot) -> Owned | None:
        """An empty record of what this rank owns of a parameter; None where the exchange has no owners."""
        return None

    def prepare(self) -> None:
        """Called when all ranks have agreed on their routes, before anything is sent; may wait."""
        return

    @abstractmethod
    def pack(self, items: Sequence[Item]) -> Cargo:
        """Encodes a bucket's gradients, whose residuals are there in the gradients' units."""
