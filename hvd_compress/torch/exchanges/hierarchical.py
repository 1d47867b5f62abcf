"""The hierarchical exchange: uncompressed within a host, compressed between hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.exchange import hosts
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.torch.collectives import Collectives, equal_hosts
from hvd_compress.torch.exchanges.base import Exchange, Relay, Transfer, Uncompressed
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.pieces import Piece
from hvd_compress.torch_common.shots import is_failure
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
        dynamic = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
        return dynamic and equal_hosts() and 1 < self.hosts.local < self.hosts.size

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        if self.collectives.size != hvd.size():
            raise ValueError(
                f"{slot.name}: expected process_set=None for exchange='hierarchical', got a set of "
                f"{self.collectives.size} of {hvd.size()} ranks: hosts are those of the whole job"
            )
        width = slot.parameter.element_size()
        hosts.check(slot.name, route.codec, self._shards(slot), self.hosts, width)

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
        step, slot.step = slot.step, slot.step + 1
        noise = NoiseKey(self.encoder.seed, self.encoder.rank, slot.index, step)
        return Levels(self, slot, gradient.reshape(-1), self._shards(slot), noise)

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        begin, end = self._shards(slot).of(hvd.local_rank())
        return Owned(begin, end, weight=self.hosts.local)

    def _shards(self, slot: Slot) -> Shards:
        return Shards(slot.count, self.hosts.local, slot.index)


class Levels(Transfer, Relay):
    """Up to three collectives: parts to their owners within the host, payloads between hosts, and back.

    The ranks of a host share its tensor out. Each adds up its part, in the order of the ranks and in
    float32, encodes the average, and exchanges payloads with the ranks that own this part on the other
    hosts. Then the ranks of the host tell each other what they got, so that all ranks decode the same.

    Args:
        exchange: hosts and process sets, which are there when this is started.
        slot: whose gradient; ``slot.owned`` is there, in the gradient's units.
        flat: the gradient, shape=(n,).
        shards: who owns what of it on each host.
        noise: this rank's position in the noise.
    """

    def __init__(
        self,
        exchange: Hierarchical,
        slot: Slot,
        flat: torch.Tensor,
        shards: Shards,
        noise: NoiseKey,
    ) -> None:
        Transfer.__init__(self, slot.name, flat)
        Relay.__init__(self, exchange.collectives)
        assert slot.owned is not None
        self._exchange = exchange
        self._kernels = exchange.encoder.kernels
        self._hosts = exchange.hosts
        self._owned = slot.owned
        self._shards = shards
        self._place = hvd.local_rank()
        self._route = slot.route
        self._noise = noise
        self._sizes = shards.payload_bytes(slot.route.codec)
        self._next: Callable[[torch.Tensor], None] = self._add_up
        self._piece: Piece | None = None
        self._payloads: list[torch.Tensor] | None = None
        self._seconds = 0.0

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        if self._exchange.within is None:
            self._add_up(self.flat.view(torch.uint8))
            return self
        ranges = [self._shards.of(place) for place in range(self._hosts.local)]
        message = self.flat
        if ranges != sorted(ranges):
            message = torch.cat([self.flat[begin:end] for begin, end in ranges])
        width = message.element_size()
        self.handle = self._exchange.within.distribute(
            message.view(torch.uint8),
            [width * (end - begin) for begin, end in ranges],
            f"{self.name} within host",
        )
        return self

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Transfer.payloads`."""
        assert self._payloads is not None
        return [rows for rows in self._payloads if rows.numel()]

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """See :meth:`Transfer.take_back`; of what was not started, there is nothing."""
        if self._piece is not None:
            self._piece.take_back(self._kernels, when)

    def write(self, scale: float) -> None:
        """See :meth:`Transfer.write`."""
        assert self._payloads is not None
        for place, rows in enumerate(self._payloads):
            if not rows.numel():
                continue
            begin, end = self._shards.of(place)
            piece = self._make_piece(self.flat[begin:end], rows[0], None)
            try:
                piece.decode(self._kernels, rows, scale * self._hosts.local)
            except PayloadError as error:
                # The kernels count the payloads, which here are one a host.
                what = str(error).replace("rank ", "host ", 1)
                raise PayloadError(f"{self.name}: in place {place}, {what}") from None

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        counters.encoded_elements += self._owned.count
        counters.encode_seconds += self._seconds
        own = self._sizes[self._place]
        before = counters.wire_bytes
        if self._exchange.within is not None:
            width = self.flat.element_size()
            counters.add_alltoall(width * self.flat.numel(), width * self._owned.count)
            counters.add_allgather(self._hosts.local, self._hosts.count * own)
        counters.local_bytes += counters.wire_bytes - before
        if self._exchange.between is not None:
            counters.add_allgather(self._hosts.count, own)

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`."""
        return Uncompressed(self._collectives, self)

    def _arrived(self, result: torch.Tensor) -> None:
        self._next(result)

    def _add_up(self, parts: torch.Tensor) -> None:
        size, device = self._sizes[self._place], self.flat.device
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        if len(payload):
            try:
                self._piece = self._encode_average(parts, payload)
            except Exception as error:
                self.error = error
                payload.zero_()
        if self._exchange.between is None:
            self._pass_on(payload)
        else:
            self._next = self._pass_on
            self.handle = self._exchange.between.gather_alike(payload, f"{self.name} between hosts")

    def _encode_average(self, parts: torch.Tensor, payload: torch.Tensor) -> Piece:
        local, width = self._hosts.local, self.flat.element_size()
        expected = local * self._owned.count * width
        if parts.numel() != expected:
            raise PayloadError(f"{self.name}: expected {expected} bytes, got {parts.numel()}")
        started = time.perf_counter()
        average = torch.zeros(self._owned.count, device=self.flat.device)
        for row in parts.view(self.flat.dtype).view(local, -1):
            average += row
        average *= 1 / local
        piece = self._make_piece(average, payload, self._owned.residual)
        piece.encode(self._kernels, self._noise)
        self._seconds = time.perf_counter() - started
        return piece

    def _pass_on(self, payloads: torch.Tensor) -> None:
        expected = self._hosts.count * self._sizes[self._place]
        if payloads.numel() != expected:
            self.error = PayloadError(
                f"{self.name}: expected {expected} bytes, got {payloads.numel()}"
            )
            payloads = torch.zeros(expected, dtype=torch.uint8, device=payloads.device)
        if self._exchange.within is None:
            self._take(payloads)
        else:
            self._next = self._take
            self.handle = self._exchange.within.gather(payloads, f"{self.name} back within host")

    def _take(self, gathered: torch.Tensor) -> None:
        count = self._hosts.count
        if gathered.numel() != count * sum(self._sizes):
            raise PayloadError(
                f"{self.name}: expected {count} times {sum(self._sizes)} bytes, got {gathered.numel()}"
            )
        blocks = gathered.split([count * size for size in self._sizes])
        self._payloads = [
            block.view(count, size) for block, size in zip(blocks, self._sizes, strict=True)
        ]
        for place, rows in enumerate(self._payloads):
            for host, payload in enumerate(rows):
                if is_failure(payload):
                    rank = host * self._hosts.local + place
                    raise ExchangeError(
                        f"{self.name}: expected a payload from every rank, got none from rank {rank}, "
                        f"whose own error says why"
                    )

    def _make_piece(
        self, flat: torch.Tensor, payload: torch.Tensor, residual: torch.Tensor | None
    ) -> Piece:
        return Piece(self._route, (len(flat),), self._noise.step, flat, payload, residual)
