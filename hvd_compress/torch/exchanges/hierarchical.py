"""The hierarchical exchange: uncompressed within a host, compressed between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.exchange import hosts
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.torch.collectives import Collectives, equal_hosts
from hvd_compress.torch.exchanges.base import Exchange, Relay, Transfer, Uncompressed
from hvd_compress.torch_common import host_parts
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.host_parts import HostParts
from hvd_compress.torch_common.slots import Owned, Slot


class Hierarchical(Exchange):
    """What leaves a host does not depend on the number of its ranks, which share the work.

    Args:
        collectives: all ranks of the job.
        encoder: what this rank encodes with.

    Attributes:
        hosts: who is where.
        within: the ranks of this host, once prepared; None if there is one.
        between: the ranks with this rank's place on all hosts, once prepared; None if there is one.
    """

    def __init__(self, collectives: Collectives, encoder: Encoder) -> None:
        super().__init__(collectives, encoder)
        self.hosts = Hosts(hvd.size(), hvd.local_size())
        self.within: Collectives | None = None
        self.between: Collectives | None = None

    @property
    def usable(self) -> bool:
        """See :attr:`Exchange.usable`: equal hosts of several ranks, and process sets at any time."""
        return hosts.usable(self.hosts.size, self.hosts.local, equal_hosts())

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        if self.collectives.size != hvd.size():
            raise ValueError(
                f"{slot.name}: expected process_set=None for exchange='hierarchical', got a set of "
                f"{self.collectives.size} of {hvd.size()} ranks: hosts are those of the whole job"
            )
        host_parts.check(slot, route, self.hosts)

    def settings(self) -> dict[str, Any]:
        """See :meth:`Exchange.settings`."""
        places = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())
        return {"hosts": hosts.describe(*places)}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """See :meth:`Exchange.prepare`: registers process sets."""
        rank = self.collectives.rank
        for ranks in self.hosts.groups():
            if len(ranks) == 1:
                continue  # Nothing to send.
            group = self.collectives.among(ranks)
            if ranks == self.hosts.within(rank):
                self.within = group
            if ranks == self.hosts.between(rank):
                self.between = group

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`; what is encoded later is the average of the host's ranks."""
        self._own(slot, gradient)
        self.encoder.release_residual(slot, gradient)
        return Levels(self, slot, gradient)

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        return host_parts.owned_of(slot, self.collectives.rank, self.hosts)


class Levels(HostParts, Transfer, Relay):
    """Up to three collectives: parts to their owners within the host, payloads between hosts, and back.

    Args:
        exchange: hosts and process sets, which are there when this is started.
        slot: whose gradient; ``slot.owned`` is there, in the gradient's units.
        gradient: of the slot's shape.
    """

    def __init__(self, exchange: Hierarchical, slot: Slot, gradient: torch.Tensor) -> None:
        Relay.__init__(self, exchange.collectives)
        HostParts.__init__(self, exchange.encoder, exchange.hosts, slot, gradient)
        self._exchange = exchange
        self._next: Callable[[torch.Tensor], None] = self._send_average

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        if self._exchange.within is None:
            self._send_average(self.message)
            return self
        self.handle = self._exchange.within.distribute(
            self.message, self.widths, f"{self.name} within host"
        )
        return self

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        self.count_coding(counters)
        own = self.sizes[self._place]
        before = counters.wire_bytes
        if self._exchange.within is not None:
            counters.add_alltoall(sum(self.widths), self.widths[self._place])
            counters.add_allgather(self._hosts.local, self._hosts.count * own)
        counters.local_bytes += counters.wire_bytes - before
        if self._exchange.between is not None:
            counters.add_allgather(self._hosts.count, own)

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`."""
        return Uncompressed(self._collectives, self)

    def _arrived(self, result: torch.Tensor) -> None:
        self._next(result)

    def _send_average(self, parts: torch.Tensor) -> None:
        payload = self.average(parts)
        if self._exchange.between is None:
            self._pass_on(payload)
        else:
            self._next = self._pass_on
            self.handle = self._exchange.between.gather_alike(payload, f"{self.name} between hosts")

    def _pass_on(self, payloads: torch.Tensor) -> None:
        expected = self._hosts.count * self.sizes[self._place]
        if payloads.numel() != expected:
            self.error = PayloadError(
                f"{self.name}: expected {expected} bytes, got {payloads.numel()}"
            )
            payloads = torch.zeros(expected, dtype=torch.uint8, device=payloads.device)
        if self._exchange.within is None:
            self._take_all(payloads)
        else:
            self._next = self._take_all
            self.handle = self._exchange.within.gather(payloads, f"{self.name} back within host")

    def _take_all(self, gathered: torch.Tensor) -> None:
        count = self._hosts.count
        if gathered.numel() != count * sum(self.sizes):
            raise PayloadError(
                f"{self.name}: expected {count} times {sum(self.sizes)} bytes, got {gathered.numel()}"
            )
        blocks = gathered.split([count * size for size in self.sizes])
        self.take([block.view(count, size) for block, size in zip(blocks, self.sizes, strict=True)])
