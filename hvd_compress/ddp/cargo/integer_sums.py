"""Norms first, then levels, each in an allreduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.ddp.cargo.base import Cargo, Item
from hvd_compress.ddp.cargo.rounds import Begin, InRounds, Round, Rounds
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.kernels.cpu_levels import CpuLevels
from hvd_compress.torch_common import level_sums
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.level_sums import LevelSum
from hvd_compress.torch_common.slots import Slot

_WORD_BYTES = 4


class IntegerSum(InRounds):
    """An allreduce adds the ranks' levels as integers (TernGrad, section 3.1).

    Attributes:
        kernels: make levels and read their sums.
    """

    def __init__(self, collectives: Collectives, encoder: Encoder) -> None:
        super().__init__(collectives, encoder)
        self.kernels = CpuLevels(encoder.kernels.threads)

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        level_sums.check(slot, route, self.collectives.size)

    def pack(self, items: Sequence[Item]) -> Cargo:
        """See :meth:`Exchange.pack`; levels are made when the ranks' norms are known."""
        return IntegerSums(items, self)


class IntegerSums(Rounds):
    """All gradients' norms side by side in one message, and then their levels in another one.

    The flags go with the norms, a float32 each: the maximum is 1 if some rank used the gradient.

    Args:
        items: the gradients.
        exchange: the ranks, their lanes, and the kernels.
    """

    def __init__(self, items: Sequence[Item], exchange: IntegerSum) -> None:
        super().__init__(items, exchange)
        self._size = exchange.collectives.size
        self._sums = [
            LevelSum(exchange.encoder, exchange.kernels, self._size, item.slot, item.gradient)
            for item in items
        ]
        used = self._write_flags(torch.empty(len(items)))
        self._norms = torch.cat([*(one.norms for one in self._sums), used])
        self._levels = torch.empty(0, dtype=torch.int32)

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Cargo.payloads`."""
        return []

    @property
    def nonfinite(self) -> bool:
        """See :meth:`Cargo.nonfinite`."""
        return any(one.nonfinite for one in self._sums)

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        one = self._sums[index]
        one.write(1.0 / self._size)
        return one.flat

    def take_back(
        self, index: int, gradient: torch.Tensor | None, when: torch.Tensor | None = None
    ) -> None:
        """See :meth:`Cargo.take_back`; there is no word for levels."""
        assert when is None
        self._sums[index].take_back(gradient=gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        for one in self._sums:
            one.count_coding(counters)
        for message in (self._norms, self._levels):
            counters.add_allreduce(self._size, _WORD_BYTES * message.numel())

    def _everyones_flags(self) -> torch.Tensor:
        return self._norms[None, -len(self.items) :]

    def _rounds(self) -> Sequence[Round]:
        return [self._share_norms, self._add_levels]

    def _share_norms(self) -> Begin:
        return lambda group: group.maximum(self._norms)

    @torch.no_grad()
    def _add_levels(self) -> Begin:
        sizes = [one.norms.numel() for one in self._sums]
        *norms, _ = self._norms.split([*sizes, len(self.items)])
        pairs = zip(self._sums, norms, strict=True)
        self._levels = torch.cat([one.make_levels(largest) for one, largest in pairs])
        return lambda group: group.add(self._levels)

    def _finish(self) -> Exception | None:
        messages = self._levels.split([one.words for one in self._sums])
        for one, message in zip(self._sums, messages, strict=True):
            one.take(message)
        return next((one.error for one in self._sums if one.error), None)
