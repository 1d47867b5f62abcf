"""What one of DDP's buckets sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hvd_compress.codecs.base import round_up
from hvd_compress.torch_common.executors import any_nonfinite
from hvd_compress.torch_common.pieces import Coded

_ALIGNMENT = 16
"""Payloads are multiples of this; gathers of other sizes are slow on NCCL."""


class Message:
    """The payloads of a bucket's encoded gradients, one after the other, and a byte each for "used".

    Args:
        sizes: of the payloads, in bytes, multiples of 16.

    Attributes:
        buffer: shape=(bytes,), uint8, what this rank sends.
        payloads: its parts, one for each size.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [*sizes, round_up(len(sizes), _ALIGNMENT)]
        self.buffer = torch.zeros(sum(self._sizes), dtype=torch.uint8)
        *self.payloads, self._used = self.buffer.split(self._sizes)

    def set_used(self, index: int) -> None:
        """Notes that this rank's backward pass has come to the gradient of that index."""
        self._used[index] = 1

    def split(self, gathered: torch.Tensor) -> tuple[list[torch.Tensor], list[bool]]:
        """The parts of all ranks' messages.

        Args:
            gathered: shape=(ranks, bytes), uint8.

        Returns:
            All ranks' payloads of each gradient, shape=(ranks, payload bytes), and whether any rank's
            backward pass came to it.
        """
        *payloads, used = gathered.split(self._sizes, dim=1)
        return payloads, used[:, : len(payloads)].any(0).tolist()


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
        coded: the encoded gradients.
        before: residuals of gradients that this rank did not use, as they were, by position in ``coded``.
        originals: gradients that are also outside of the buffer, by position in ``coded``.
        message: what is gathered; None where nothing is encoded.
        dense: what is allreduced.
        gathered: all ranks' messages, once there, shape=(ranks, bytes), uint8.
        waiting: how many collectives are not back yet.
        future: gets :attr:`buffer` when it holds the averages, or the exception.
    """

    buffer: torch.Tensor
    coded: list[Coded] = field(default_factory=list)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    originals: dict[int, torch.Tensor] = field(default_factory=dict)
    message: Message | None = None
    dense: list[Dense] = field(default_factory=list)
    gathered: torch.Tensor | None = None
    waiting: int = 0
    future: torch.futures.Future[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        on_gpu = self.buffer.device.type != "cpu"
        self.future = torch.futures.Future(devices=[self.buffer.device] if on_gpu else None)

    @property
    def recallable(self) -> bool:
        """Whether residuals may have to be taken back."""
        return any(coded.route.feedback.enabled for coded in self.coded)

    @property
    def writable(self) -> bool:
        """Whether residuals could be taken back without the gradients in the buffer."""
        kept = self.before.keys() | self.originals.keys()
        return all(
            index in kept or not coded.route.feedback.enabled
            for index, coded in enumerate(self.coded)
        )

    @property
    def nonfinite(self) -> bool:
        """Whether an Inf or a NaN was in a gradient that some rank encoded."""
        if self.message is None:
            return False
        assert self.gathered is not None
        payloads, _ = self.message.split(self.gathered)
        return any(any_nonfinite(rows) for rows in payloads)
