"""The simplest exchange: every rank gets every rank's payloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.ddp.cargo.base import Cargo, Exchange, Item
from hvd_compress.ddp.collectives import Collectives, Over
from hvd_compress.exchange.counters import Counters
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.pieces import Coded


class Allgather(Exchange):
    """Every rank decodes the payloads of all: its traffic grows with the number of ranks."""

    def pack(self, items: Sequence[Item]) -> Cargo:
        """See :meth:`Exchange.pack`."""
        return Gathered(items, self.collectives, self.encoder)


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
        self._sizes = [*sizes, self._flag_bytes]
        device = items[0].gradient.device
        self._message = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        *payloads, flags = self._message.split(self._sizes)
        self._write_flags(flags)
        self._coded: list[Coded] = [
            encoder.encode(item.slot, item.gradient, payload)
            for item, payload in zip(items, payloads, strict=True)
        ]
        self._rows: torch.Tensor | None = None

    def send(self, over: Over) -> None:
        """See :meth:`Cargo.send`."""
        self._rows, work = self._collectives.gather(self._message)
        self._collectives.when_over(work, over)

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Cargo.payloads`."""
        return self._split()[:-1]

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        coded = self._coded[index]
        coded.decode(self._kernels, self._split()[index], 1.0 / self._collectives.size)
        return coded.flat

    def take_back(
        self, index: int, gradient: torch.Tensor | None, when: torch.Tensor | None = None
    ) -> None:
        """See :meth:`Cargo.take_back`."""
        self._coded[index].take_back(self._kernels, when, gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        for coded in self._coded:
            coded.count(counters)
        counters.add_allgather(self._collectives.size, self._message.numel())

    def _everyones_flags(self) -> torch.Tensor:
        return self._split()[-1]

    def _split(self) -> Sequence[torch.Tensor]:
        assert self._rows is not None
        return self._rows.split(self._sizes, dim=1)
