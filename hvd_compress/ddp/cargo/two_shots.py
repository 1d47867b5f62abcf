"""Parts to their owners, averages from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hvd_compress.ddp.cargo.base import Cargo, Item
from hvd_compress.ddp.cargo.rounds import Begin, InRounds, Round, Rounds
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange import two_shot
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common.shipment import Shipment
from hvd_compress.torch_common.shots import Shots, owned_of, shards_of
from hvd_compress.torch_common.slots import Owned, Slot


class TwoShot(InRounds):
    """What a rank sends does not depend on the number of ranks (1-bit SGD, section 3.1)."""

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        two_shot.check(slot.name, route.codec, shards_of(slot, self.collectives.size))

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        return owned_of(slot, self.collectives.rank, self.collectives.size)

    def pack(self, items: Sequence[Item]) -> Cargo:
        """See :meth:`Exchange.pack`."""
        return TwoShots(items, self)


class TwoShots(Rounds):
    """Each gradient's parts side by side in a message for each owner, and its averages in one from it.

    A gather wants messages of one length, so that owners of less send zeros behind their averages. The
    flags go with the second shot, which all ranks get.

    Args:
        items: the gradients, whose slots own their parts.
        exchange: the ranks, and their lanes.
    """

    def __init__(self, items: Sequence[Item], exchange: TwoShot) -> None:
        super().__init__(items, exchange)
        self._rank, self._size = exchange.collectives.rank, exchange.collectives.size
        self._shots = [
            Shots(exchange.encoder, self._size, item.slot, item.gradient) for item in items
        ]
        names = ", ".join(shots.name for shots in self._shots)
        self._shipment = Shipment(names, self._shots, self._rank, self._size)
        self._received: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._length = 0

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Cargo.payloads`."""
        return [rows for shots in self._shots for rows in shots.payloads]

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        shots = self._shots[index]
        shots.write(1.0 / self._size)
        return shots.flat

    def take_back(
        self, index: int, gradient: torch.Tensor | None, when: torch.Tensor | None = None
    ) -> None:
        """See :meth:`Cargo.take_back`."""
        self._shots[index].take_back(when, gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        own = self._shipment.sizes[self._rank]
        for shots in self._shots:
            shots.count_coding(counters)
        counters.add_alltoall(sum(self._shipment.sizes), own)
        counters.add_allgather(self._size, self._length)

    def _everyones_flags(self) -> torch.Tensor:
        assert self._rows is not None
        return self._rows[:, max(self._shipment.sizes) :]

    def _rounds(self) -> Sequence[Round]:
        return [self._to_owners, self._from_owners]

    def _to_owners(self) -> Begin:
        message, sizes = self._shipment.to_owners(), self._shipment.sizes

        def begin(group: Collectives) -> dist.Work:
            self._received, work = group.distribute(message, sizes)
            return work

        return begin

    @torch.no_grad()
    def _from_owners(self) -> Begin:
        assert self._received is not None
        flags = self._flags()
        averages = self._shipment.average(self._received)
        longest = max(self._shipment.sizes)
        self._length = longest + flags.numel()
        padding = averages.new_zeros(longest - averages.numel())
        message = torch.cat([averages, padding, flags])

        def begin(group: Collectives) -> dist.Work:
            self._rows, work = group.gather(message)
            return work

        return begin

    def _finish(self) -> Exception | None:
        assert self._rows is not None
        owners = zip(self._rows, self._shipment.sizes, strict=True)
        self._shipment.take(torch.cat([row[:size] for row, size in owners]))
        return next((shots.error for shots in self._shots if shots.error), None)
