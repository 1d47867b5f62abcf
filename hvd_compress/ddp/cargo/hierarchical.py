"""Uncompressed within a host, compressed between hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.ddp.cargo.base import Cargo, Item
from hvd_compress.ddp.cargo.rounds import Begin, InRounds, Round, Rounds
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange import hosts
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common import host_parts
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.host_parts import HostParts
from hvd_compress.torch_common.slots import Owned, Slot

_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""A rank's place on its host, the host's ranks, and the host's number, as torchrun sets them."""


class Hierarchical(InRounds):
    """What leaves a host does not depend on the number of its ranks, which share the work.

    Args:
        collectives: all ranks of the job.
        encoder: what this rank encodes with.

    Attributes:
        hosts: who is where.

    Raises:
        ValueError: the environment does not tell.
    """

    keeps_residuals = False

    def __init__(self, collectives: Collectives, encoder: Encoder) -> None:
        super().__init__(collectives, encoder)
        self._place, local, self._host = _read_environment()
        self.hosts = Hosts(collectives.size, local)

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        if self.collectives.size != dist.get_world_size():
            raise ValueError(
                f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group of "
                f"{self.collectives.size} of {dist.get_world_size()} ranks: hosts are those of the whole "
                f"job"
            )
        host_parts.check(slot, route, self.hosts)

    def settings(self) -> dict[str, Any]:
        """See :meth:`Exchange.settings`."""
        rank, size = self.collectives.rank, self.collectives.size
        return {"hosts": hosts.describe(rank, size, self._place, self.hosts.local, self._host)}

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        return host_parts.owned_of(slot, self.collectives.rank, self.hosts)

    def pack(self, items: Sequence[Item]) -> Cargo:
        """See :meth:`Exchange.pack`; what is encoded later are the averages of the host's ranks."""
        return Relayed(items, self)

    def _groups(self) -> Sequence[Collectives]:
        rank = self.collectives.rank
        within, between = self.hosts.within(rank), self.hosts.between(rank)
        rounds = [within, between, within]
        return [self.collectives.among(ranks) for ranks in rounds if len(ranks) > 1]


class Relayed(Rounds):
    """Up to three rounds: parts to their owners within the host, payloads between hosts, and back.

    The flags go with the payloads. The messages that go back are of one length, so that owners of less send
    zeros behind theirs.

    Args:
        items: the gradients, whose slots own their parts.
        exchange: hosts, and the ranks' lanes.
    """

    def __init__(self, items: Sequence[Item], exchange: Hierarchical) -> None:
        super().__init__(items, exchange)
        self._hosts = exchange.hosts
        self._place = exchange.hosts.place(exchange.collectives.rank)
        self._parts = [
            HostParts(exchange.encoder, exchange.hosts, item.slot, item.gradient) for item in items
        ]
        self._received: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._blocks: torch.Tensor | None = None

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Cargo.payloads`."""
        return [rows for parts in self._parts for rows in parts.payloads]

    def write(self, index: int) -> torch.Tensor:
        """See :meth:`Cargo.write`."""
        parts = self._parts[index]
        parts.write(1.0 / self._hosts.size)
        return parts.flat

    def take_back(
        self, index: int, gradient: torch.Tensor | None, when: torch.Tensor | None = None
    ) -> None:
        """See :meth:`Cargo.take_back`; what was encoded is no gradient, and still there."""
        self._parts[index].take_back(when)

    def count(self, counters: Counters) -> None:
        """See :meth:`Cargo.count`."""
        assert self._rows is not None and self._blocks is not None
        for parts in self._parts:
            parts.count_coding(counters)
        before = counters.wire_bytes
        if self._hosts.local > 1:
            widths = self._widths()
            counters.add_alltoall(sum(widths), widths[self._place])
            counters.add_allgather(self._hosts.local, self._blocks[0].numel())
        counters.local_bytes += counters.wire_bytes - before
        if self._hosts.count > 1:
            counters.add_allgather(self._hosts.count, self._rows.shape[1])

    def _everyones_flags(self) -> torch.Tensor:
        assert self._blocks is not None
        return self._blocks[:, :, : self._flag_bytes].flatten(0, 1)

    def _rounds(self) -> Sequence[Round]:
        within: list[Round] = [self._to_owners] if self._hosts.local > 1 else []
        between: list[Round] = [self._between_hosts] if self._hosts.count > 1 else []
        back: list[Round] = [self._back_within_host] if self._hosts.local > 1 else []
        return within + between + back

    def _to_owners(self) -> Begin:
        places = zip(*(parts.parts for parts in self._parts), strict=True)
        message = torch.cat([part for place in places for part in place])
        widths = self._widths()

        def begin(group: Collectives) -> dist.Work:
            self._received, work = group.distribute(message, widths)
            return work

        return begin

    def _between_hosts(self) -> Begin:
        message = self._average()

        def begin(group: Collectives) -> dist.Work:
            self._rows, work = group.gather(message)
            return work

        return begin

    def _back_within_host(self) -> Begin:
        rows = self._all_rows()
        longest = max(map(sum, self._sizes()))
        padding = rows.new_zeros(len(rows), self._flag_bytes + longest - rows.shape[1])
        message = torch.cat([rows, padding], dim=1)

        def begin(group: Collectives) -> dist.Work:
            blocks, work = group.gather(message.view(-1))
            self._blocks = blocks.view(group.size, *message.shape)
            return work

        return begin

    def _finish(self) -> Exception | None:
        if self._blocks is None:
            self._blocks = self._all_rows()[None]
        by_place = [
            block[:, self._flag_bytes :][:, : sum(sizes)].split(sizes, dim=1)
            for block, sizes in zip(self._blocks, self._sizes(), strict=True)
        ]
        for parts, payloads in zip(self._parts, zip(*by_place, strict=True), strict=True):
            parts.take(payloads)
        return next((parts.error for parts in self._parts if parts.error), None)

    @torch.no_grad()
    def _average(self) -> torch.Tensor:
        received = self._received
        if received is None:
            received = torch.cat([parts.message for parts in self._parts])
        own = [parts.widths[self._place] for parts in self._parts]
        rows = received.view(self._hosts.local, sum(own)).split(own, dim=1)
        pairs = zip(self._parts, rows, strict=True)
        return torch.cat([self._flags(), *(parts.average(row.reshape(-1)) for parts, row in pairs)])

    def _all_rows(self) -> torch.Tensor:
        """What this rank and those in its place on the other hosts have sent, shape=(hosts, bytes)."""
        if self._rows is None:
            self._rows = self._average()[None]
        return self._rows

    def _widths(self) -> list[int]:
        """Bytes of all gradients' parts as they are, one for each place."""
        return [
            sum(widths) for widths in zip(*(parts.widths for parts in self._parts), strict=True)
        ]

    def _sizes(self) -> list[list[int]]:
        """For each place, bytes of the gradients' parts as payloads."""
        return [list(sizes) for sizes in zip(*(parts.sizes for parts in self._parts), strict=True)]


def _read_environment() -> tuple[int, int, int]:
    values = [os.environ.get(name, "") for name in _VARIABLES]
    if not all(value.isdecimal() for value in values):
        found = ", ".join(f"{n}={v!r}" for n, v in zip(_VARIABLES, values, strict=True))
        raise ValueError(
            f"Compressor.exchange: expected {', '.join(_VARIABLES)} in the environment for 'hierarchical', "
            f"got {found}: start the ranks by torchrun, which sets them, or set them to this rank's place "
            f"on its host, the number of ranks there, and the host's number"
        )
    place, local, host = map(int, values)
    if not place < local:
        raise ValueError(
            f"Compressor.exchange: expected LOCAL_RANK below LOCAL_WORLD_SIZE for 'hierarchical', got "
            f"{place} of {local}"
        )
    return place, local, host
