"""One gradient through hosts: parts added up within a host, payloads between hosts; whoever sends them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.exchange import hosts as layout
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.hosts import Hosts
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.pieces import Piece
from hvd_compress.torch_common.shots import is_failure
from hvd_compress.torch_common.slots import Owned, Slot


def shards_of(slot: Slot, hosts: Hosts) -> Shards:
    """Which place on each host owns what of a parameter."""
    return Shards(slot.count, hosts.local, slot.index)


def owned_of(slot: Slot, rank: int, hosts: Hosts) -> Owned:
    """An empty record of what a rank owns of a parameter on its host."""
    begin, end = shards_of(slot, hosts).of(hosts.place(rank))
    return Owned(begin, end, weight=hosts.local)


def check(slot: Slot, route: Route, hosts: Hosts) -> None:
    """Raises ``ValueError`` where a parameter's gradients cannot go through hosts."""
    width = slot.parameter.element_size()
    layout.check(slot.name, route.codec, shards_of(slot, hosts), hosts, width)


class HostParts:
    """A gradient's parts, and their averages over each host.

    The ranks of a host share its tensor out. Each adds up its part, in the order of the ranks and in
    float32, encodes the average, and exchanges payloads with the ranks that own this part on the other
    hosts. Then the ranks of the host tell each other what they got, so that all ranks decode the same. A
    rank that fails sends zeros, so that none waits for it in vain.

    Args:
        encoder: what this rank encodes with.
        hosts: who is where.
        slot: whose gradient; ``slot.owned`` is there, in the gradient's units.
        gradient: of the slot's shape.

    Attributes:
        name: the parameter's.
        flat: the gradient's elements, shape=(n,), as they were given; the result is written over them.
        widths: bytes of the parts as they are, one for each place on a host.
        sizes: bytes of the parts' payloads, one for each place.
        error: what went wrong.
    """

    error: Exception | None

    def __init__(self, encoder: Encoder, hosts: Hosts, slot: Slot, gradient: torch.Tensor) -> None:
        assert slot.owned is not None
        self.name = slot.name
        self.flat = gradient.reshape(-1)
        self.error = None
        self._kernels = encoder.kernels
        self._hosts = hosts
        self._place = hosts.place(encoder.rank)
        self._owned = slot.owned
        self._route = slot.route
        self._noise = NoiseKey(encoder.seed, encoder.rank, slot.index, slot.step)
        slot.step += 1
        shards = shards_of(slot, hosts)
        self._ranges = [shards.of(place) for place in range(hosts.local)]
        self.widths = [(end - begin) * self.flat.element_size() for begin, end in self._ranges]
        self.sizes = shards.payload_bytes(slot.route.codec)
        self._piece: Piece | None = None
        self._payloads: Sequence[torch.Tensor] | None = None
        self._seconds = 0.0

    @property
    def parts(self) -> list[torch.Tensor]:
        """The gradient's parts, one for each place, shape=(bytes,), uint8."""
        return [self.flat[begin:end].view(torch.uint8) for begin, end in self._ranges]

    @property
    def message(self) -> torch.Tensor:
        """All parts, one after the other, shape=(bytes,), uint8."""
        if self._ranges == sorted(self._ranges):
            return self.flat.view(torch.uint8)
        return torch.cat(self.parts)

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """Of each place's part, those of all hosts, shape=(hosts, bytes), uint8; none of empty parts."""
        assert self._payloads is not None
        return [rows for rows in self._payloads if rows.numel()]

    def average(self, parts: torch.Tensor) -> torch.Tensor:
        """This rank's work as an owner.

        Args:
            parts: this rank's part of the gradients of its host's ranks, in their order, shape=(bytes,),
                uint8.

        Returns:
            The average's payload, shape=(bytes,), uint8; zeros if :attr:`error` says why there is none.
        """
        size, device = self.sizes[self._place], self.flat.device
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        if len(payload):
            try:
                self._piece = self._encode_average(parts, payload)
            except Exception as error:
                self.error = error
                payload.zero_()
        return payload

    def take(self, payloads: Sequence[torch.Tensor]) -> None:
        """Takes what the owners have sent.

        Where the host must not look at it, an owner's failure is found when it is decoded.

        Args:
            payloads: for each place, those of all hosts, shape=(hosts, bytes), uint8.
        """
        self._payloads = payloads
        for place, rows in enumerate(payloads):
            for host, payload in enumerate(rows):
                if self._kernels.readable(payload) and is_failure(payload):
                    rank = host * self._hosts.local + place
                    self.error = self.error or ExchangeError(
                        f"{self.name}: expected a payload from every rank, got none from rank {rank}, "
                        f"whose own error says why"
                    )

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """Undoes what sending did to this rank's residual; of what was not started, there is nothing.

        Args:
            when: as for :meth:`hvd_compress.torch_common.pieces.Piece.take_back`.
        """
        if self._piece is not None:
            self._piece.take_back(self._kernels, when)

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients to ``flat``.

        Raises:
            PayloadError: a payload was altered on its way.
        """
        assert self._payloads is not None
        for place, rows in enumerate(self._payloads):
            if not rows.numel():
                continue
            begin, end = self._ranges[place]
            piece = self._make_piece(self.flat[begin:end], rows[0], None)
            try:
                piece.decode(self._kernels, rows, scale * self._hosts.local)
            except PayloadError as error:
                # The kernels count the payloads, which here are one a host.
                what = str(error).replace("rank ", "host ", 1)
                raise PayloadError(f"{self.name}: in place {place}, {what}") from None

    def count_coding(self, counters: Counters) -> None:
        """Adds what was computed to the counters."""
        counters.encoded_elements += self._owned.count
        counters.encode_seconds += self._seconds

    def _encode_average(self, parts: torch.Tensor, payload: torch.Tensor) -> Piece:
        local = self._hosts.local
        expected = local * self.widths[self._place]
        if parts.numel() != expected:
            raise PayloadError(f"{self.name}: expected {expected} bytes, got {parts.numel()}")
        started = time.perf_counter()
        average = torch.zeros(self._owned.count, device=self.flat.device)
        for row in parts.view(self.flat.dtype).view(local, -1):
            average += row
        average *= 1 / local
        # What an earlier codec left waits to be released.
        residual = self._owned.residual if self._route.feedback.enabled else None
        piece = self._make_piece(average, payload, residual)
        piece.encode(self._kernels, self._noise)
        self._seconds = time.perf_counter() - started
        return piece

    def _make_piece(
        self, flat: torch.Tensor, payload: torch.Tensor, residual: torch.Tensor | None
    ) -> Piece:
        return Piece(self._route, (len(flat),), self._noise.step, flat, payload, residual)
