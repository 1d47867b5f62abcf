"""A bucket's encoded gradients on their way through the ranks: one class for each exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvd_compress.codecs.base import round_up
from hvd_compress.ddp.collectives import Collectives, when_over
from hvd_compress.ddp.lane import Lane
from hvd_compress.exchange.counters import Counters
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import any_nonfinite
from hvd_compress.torch_common.pieces import Coded
from hvd_compress.torch_common.shipment import Shipment
from hvd_compress.torch_common.shots import Shots
from hvd_compress.torch_common.slots import Slot

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


class Gathered(Cargo):
    """Every rank gets every rank's payloads.

    Args:
        items: the gradients.
        collectives: the ranks.
        encoder: what this rank encodes with.
    """

    def __init__(self, items: Sequence[Item], collectives: Collectives, encoder: Encoder) -> None:
        super().__init__(items)
        self._collectives = collectives
        self._kernels = encoder.kernels
        slots = [item.slot for item in items]
        sizes = [slot.route.codec.payload_bytes(slot.shape) for slot in slots]
        flags = self._flags()
        self._sizes = [*sizes, flags.numel()]
        self._message = torch.empty(sum(self._sizes), dtype=torch.uint8)
        *payloads, rest = self._message.split(self._sizes)
        rest.copy_(flags)
        self._coded: list[Coded] = [
            encoder.encode(item.slot, item.gradient, payload)
            for item, payload in zip(items, payloads, strict=True)
        ]
        self._rows: torch.Tensor | None = None

    def send(self, over: Over) -> None:
        """See :meth:`Cargo.send`."""
        self._rows, work = self._collectives.gather(self._message)
        when_over(work, over)

    @property
    def nonfinite(self) -> bool:
        """See :meth:`Cargo.nonfinite`."""
        return any(any_nonfinite(rows) for rows in self._split()[:-1])

    @property
    def used(self) -> list[bool]:
        """See :meth:`Cargo.used`."""
        return self._split()[-1][:, : len(self.items)].any(0).tolist()

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        coded = self._coded[index]
        coded.decode(self._kernels, self._split()[index], 1.0 / self._collectives.size)
        return coded.flat

    def take_back(self, index: int, gradient: torch.Tensor | None) -> None:
        """See :meth:`Cargo.take_back`."""
        self._coded[index].take_back(self._kernels, numbers=gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        for coded in self._coded:
            coded.count(counters)
        counters.add_allgather(self._collectives.size, self._message.numel())

    def _split(self) -> Sequence[torch.Tensor]:
        assert self._rows is not None
        return self._rows.split(self._sizes, dim=1)


class TwoShots(Cargo):
    """Parts to their owners, averages from them; the second shot starts when the first one is over.

    A gather wants messages of one length, so that owners of less send zeros behind their averages. The
    flags go with the second shot, which all ranks get.

    Args:
        items: the gradients, whose slots own their parts.
        collectives: the ranks, for the first shots.
        encoder: what this rank encodes with.
        lane: for the second shots, once there is one.
    """

    def __init__(
        self,
        items: Sequence[Item],
        collectives: Collectives,
        encoder: Encoder,
        lane: Callable[[], Lane],
    ) -> None:
        super().__init__(items)
        self._collectives = collectives
        self._lane = lane
        self._shots = [Shots(encoder, collectives.size, item.slot, item.gradient) for item in items]
        names = ", ".join(shots.name for shots in self._shots)
        self._shipment = Shipment(names, self._shots, collectives.rank, collectives.size)
        self._used: torch.Tensor | None = None
        self._length = 0

    def send(self, over: Over) -> None:
        """See :meth:`Cargo.send`."""
        lane = self._lane()
        turn = lane.take_a_turn()
        message, sizes = self._shipment.to_owners(), self._shipment.sizes
        received, work = self._collectives.distribute(message, sizes)

        def first_over(error: Exception | None) -> None:
            if error is not None:
                over(error)
                return
            try:
                second = self._second(received)
            except Exception as problem:
                over(problem)
            else:
                lane.start(turn, lambda group: self._gather(second, group, over))

        when_over(work, first_over)

    @property
    def nonfinite(self) -> bool:
        """See :meth:`Cargo.nonfinite`."""
        return any(any_nonfinite(rows) for shots in self._shots for rows in shots.payloads)

    @property
    def used(self) -> list[bool]:
        """See :meth:`Cargo.used`."""
        assert self._used is not None
        return self._used.tolist()

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        shots = self._shots[index]
        shots.write(1.0 / self._collectives.size)
        return shots.flat

    def take_back(self, index: int, gradient: torch.Tensor | None) -> None:
        """See :meth:`Cargo.take_back`."""
        self._shots[index].take_back(gradient=gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        own = self._shipment.sizes[self._collectives.rank]
        for shots in self._shots:
            shots.count_coding(counters)
        counters.add_alltoall(sum(self._shipment.sizes), own)
        counters.add_allgather(self._collectives.size, self._length)

    @torch.no_grad()
    def _second(self, received: torch.Tensor) -> torch.Tensor:
        flags = self._flags()
        averages = self._shipment.average(received)
        longest = max(self._shipment.sizes)
        self._length = longest + flags.numel()
        padding = averages.new_zeros(longest - averages.numel())
        return torch.cat([averages, padding, flags])

    def _gather(self, second: torch.Tensor, group: Collectives, over: Over) -> None:
        try:
            rows, work = group.gather(second)
        except Exception as error:
            over(error)
        else:
            when_over(work, lambda error: over(error or self._take(rows)))

    def _take(self, rows: torch.Tensor) -> Exception | None:
        try:
            owners = zip(rows, self._shipment.sizes, strict=True)
            self._shipment.take(torch.cat([row[:size] for row, size in owners]))
        except Exception as error:
            return error
        flags = rows[:, max(self._shipment.sizes) :]
        self._used = flags[:, : len(self.items)].any(0)
        return next((shots.error for shots in self._shots if shots.error), None)
