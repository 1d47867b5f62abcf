"""What one of DDP's buckets sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hvd_compress.ddp.cargo.base import Cargo, Item


@dataclass(eq=False)
class Dense:
    """Gradients that are averaged by an allreduce.

    Attributes:
        gradients: what the average is written over.
        sent: their elements one after the other, shape=(n,), in the dtype that is added.
    """

    gradients: list[torch.Tensor]
    sent: torch.Tensor

    def write(self) -> None:
        """Copies the average to where the gradients were."""
        parts = self.sent.split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            if gradient.data_ptr() != part.data_ptr():
                gradient.copy_(part.view(gradient.shape))


@dataclass(eq=False)
class Parcel:
    """One bucket's gradients on their way.

    Attributes:
        buffer: the bucket's memory; the averages are written over the gradients there.
        cargo: the encoded gradients; None where there are none.
        dense: what is allreduced.
        waiting: how much of it is not back yet: the cargo, and each of ``dense``.
        future: gets :attr:`buffer` when it holds the averages, or the exception.
    """

    buffer: torch.Tensor
    cargo: Cargo | None = None
    dense: list[Dense] = field(default_factory=list)
    waiting: int = 0
    future: torch.futures.Future[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        on_gpu = self.buffer.device.type != "cpu"
        self.future = torch.futures.Future(devices=[self.buffer.device] if on_gpu else None)

    @property
    def items(self) -> Sequence[Item]:
        """The encoded gradients."""
        return () if self.cargo is None else self.cargo.items

    @property
    def recallable(self) -> bool:
        """Whether residuals may have to be taken back."""
        return any(item.slot.route.feedback.enabled for item in self.items)

    @property
    def writable(self) -> bool:
        """Whether residuals could be taken back without the gradients in the buffer."""
        return all(
            item.before is not None
            or item.original is not None
            or not item.slot.route.feedback.enabled
            for item in self.items
        )
