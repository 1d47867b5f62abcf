"""What an exchange is, and a bucket's encoded gradients on their way through the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hvd_compress.codecs.base import round_up
from hvd_compress.ddp.collectives import Collectives, Over
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import any_nonfinite, keep_from_reuse
from hvd_compress.torch_common.slots import Owned, Slot

_ALIGNMENT = 16
"""Payloads are multiples of this; gathers of other sizes are slow on NCCL."""


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

    def put_back(self, when: torch.Tensor | None = None) -> None:
        """Undoes what sending did to the residuals that :meth:`remember` has kept.

        Args:
            when: a word on their device, shape=(1,), int32; nothing is undone where it holds 0.
        """
        assert self.before is not None
        for holder, kept in zip((self.slot, self.slot.owned), self.before, strict=True):
            if holder is None:
                continue
            if when is None or holder.residual is None or kept is None:
                holder.residual = kept
            else:
                # In place: the next step goes on with it in the stream that it was made in.
                keep_from_reuse(kept)
                holder.residual.copy_(torch.where(when != 0, kept, holder.residual))


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
    def payloads(self) -> Sequence[torch.Tensor]:
        """What has come that was encoded, each shape=(k, bytes), uint8; levels are none."""

    @property
    def nonfinite(self) -> bool:
        """Whether an Inf or a NaN was in a gradient that some rank encoded; waits for its device."""
        return any(any_nonfinite(rows) for rows in self.payloads)

    @property
    def used(self) -> list[bool]:
        """For each gradient, whether any rank's backward pass came to it.

        Waits for the gradients' device, unless this rank's came to all of them.
        """
        if all(item.used for item in self.items):
            return [True] * len(self.items)
        return self._everyones_flags()[:, : len(self.items)].any(0).tolist()

    @abstractmethod
    def write(self, index: int) -> torch.Tensor:
        """Writes the ranks' average of one gradient over it.

        Returns:
            It, shape=(n,): a copy, where the gradient is not contiguous.

        Raises:
            PayloadError: a payload was altered on its way.
        """

    @abstractmethod
    def take_back(
        self, index: int, gradient: torch.Tensor | None, when: torch.Tensor | None = None
    ) -> None:
        """Takes residuals back to what they were before one gradient was encoded.

        Args:
            index: of the gradient.
            gradient: its elements, shape=(n,), where the bucket does not hold them any more.
            when: as for :meth:`hvd_compress.torch_common.pieces.Piece.take_back`.
        """

    @abstractmethod
    def count(self, counters: Counters) -> None:
        """Adds what was sent and encoded to the counters; called when it has arrived."""

    @abstractmethod
    def _everyones_flags(self) -> torch.Tensor:
        """The ranks' flags, shape=(ranks, at least as many as gradients), not 0 where used."""

    def _write_flags(self, flags: torch.Tensor) -> torch.Tensor:
        """Writes which gradients this rank used, the rest 0; returns what it was given."""
        flags.zero_()
        flags[: len(self.items)] = 1
        for index, item in enumerate(self.items):
            if not item.used:
                flags[index] = (
                    0  # By a kernel: to copy them to a device, the host would have to wait.
                )
        return flags

    def _flags(self) -> torch.Tensor:
        """The same in bytes of their own, on the gradients' device."""
        device = self.items[0].gradient.device
        return self._write_flags(torch.empty(self._flag_bytes, dtype=torch.uint8, device=device))

    @property
    def _flag_bytes(self) -> int:
        return round_up(len(self.items), _ALIGNMENT)


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
