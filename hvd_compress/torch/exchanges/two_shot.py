"""The two-shot exchange: parts to their owners, averages from them."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any, ClassVar

import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.exchange import two_shot
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Exchange, Refused, Transfer, is_failure
from hvd_compress.torch.owner_steps import OwnerStep
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.pieces import Piece, any_nonfinite
from hvd_compress.torch_common.slots import Owned, Slot


class TwoShot(Exchange):
    """What a rank sends does not depend on the number of ranks (1-bit SGD, section 3.1).

    Args:
        collectives: the ranks.
        encoder: what this rank encodes with.
        owner_step: what owners do with the averages before they send them, or None.
    """

    def __init__(
        self, collectives: Collectives, encoder: Encoder, owner_step: OwnerStep | None
    ) -> None:
        super().__init__(collectives, encoder)
        self._owner_step = owner_step

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        two_shot.check(slot.name, route.codec, self._shards(slot))

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`."""
        self._own(slot, gradient)
        if slot.route.feedback.enabled:
            self.encoder.residual(slot)
        else:
            self.encoder.release_residual(slot, gradient)
        shots = Shots(
            self.collectives, self.encoder, self._owner_step, slot, gradient, self._shards(slot)
        )
        slot.step += 1
        return shots

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        begin, end = self._shards(slot).of(self.collectives.rank)
        return Owned(begin, end, weight=self.collectives.size)

    def _shards(self, slot: Slot) -> Shards:
        return Shards(slot.count, self.collectives.size, slot.index)


class Shots(Transfer):
    """An alltoall of shards, and an allgather of their averages.

    The owner's work between the two is done by whoever calls :meth:`advance`. An owner that fails sends
    zeros, so that no rank waits for it in vain.

    Args:
        collectives: the ranks.
        encoder: what this rank encodes with.
        owner_step: see :class:`TwoShot`.
        slot: whose gradient; its residuals are in the gradient's units.
        gradient: of the slot's shape.
        shards: who owns what of it.
    """

    relays: ClassVar[bool] = True

    def __init__(
        self,
        collectives: Collectives,
        encoder: Encoder,
        owner_step: OwnerStep | None,
        slot: Slot,
        gradient: torch.Tensor,
        shards: Shards,
    ) -> None:
        super().__init__(collectives, slot.name, gradient.reshape(-1))
        assert slot.owned is not None
        self._kernels = encoder.kernels
        self._owner_step = owner_step
        self._owned = slot.owned
        self._shards = shards
        self._route = slot.route
        self._key = NoiseKey(encoder.seed, 0, slot.index, slot.step)
        self._loss_scale = encoder.loss_scale()
        self._sizes = shards.payload_bytes(slot.route.codec)
        self._message = torch.empty(sum(self._sizes), dtype=torch.uint8)
        self._seconds_encoding = self._seconds_decoding = 0.0
        self._parts = self._encode_parts(slot.residual)
        self._added_up = False
        self._average: Piece | None = None
        self._state_before: dict[str, Any] | None = None
        self._averages: list[torch.Tensor] | None = None

    def start(self) -> None:
        """See :meth:`Transfer.start`."""
        self.handle = self._collectives.distribute(
            self._message, self._sizes, f"{self.name} to owners"
        )

    @property
    def nonfinite(self) -> bool:
        """See :meth:`Transfer.nonfinite`: what was flagged in the first shot is in the second."""
        assert self._averages is not None
        return any(
            any_nonfinite(payload[None].numpy()) for payload in self._averages if len(payload)
        )

    def take_back(self) -> None:
        """See :meth:`Transfer.take_back`; the owner's residual and state as well."""
        for part in self._parts:
            part.take_back(self._kernels)
        if self._average is not None:
            self._average.take_back(self._kernels)
        if self._state_before is not None:
            self._owned.state = self._state_before

    def write(self, scale: float) -> None:
        """See :meth:`Transfer.write`."""
        assert self._averages is not None
        for owner, payload in enumerate(self._averages):
            if not len(payload):
                continue
            begin, end = self._shards.of(owner)
            piece = self._piece(begin, end, self.flat[begin:end], payload, None)
            try:
                piece.decode(self._kernels, payload[None], scale * self._collectives.size)
            except PayloadError as error:
                # The kernels count the payloads of one call, and here every call has one.
                what = str(error).removeprefix("rank 0's ")
                raise PayloadError(f"{self.name}: rank {owner}'s average: {what}") from None

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        own = self._sizes[self._collectives.rank]
        counters.encoded_elements += self.flat.numel()
        counters.add_alltoall(sum(self._sizes), own)
        counters.add_allgather(self._collectives.size, own)
        counters.encode_seconds += self._seconds_encoding
        counters.decode_seconds += self._seconds_decoding

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`; an owner's step cannot be left out."""
        if self._owner_step is None:
            return super().alone()
        return Refused(
            self._collectives,
            self,
            f"{self.name}: expected all {self._collectives.size} ranks to take part in a step with an "
            f"owner_step, got some that have called hvd.join(); the parts that they own cannot be stepped",
        )

    def _arrived(self, result: torch.Tensor) -> None:
        if not self._added_up:
            self._send_average(result)
        else:
            self._take_averages(result)

    def _send_average(self, received: torch.Tensor) -> None:
        self._added_up = True
        payload = torch.zeros(self._sizes[self._collectives.rank], dtype=torch.uint8)
        if len(payload):
            owned = self._owned
            flat = torch.empty(owned.count)
            average = self._piece(owned.begin, owned.end, flat, payload, owned.residual)
            try:
                self._make_average(average, received)
                self._average = average
            except Exception as error:
                self.error = error
                payload.zero_()
        self.handle = self._collectives.gather(payload, f"{self.name} from owners")

    def _make_average(self, average: Piece, received: torch.Tensor) -> None:
        ranks, expected = self._collectives.size, average.payload.numel()
        if received.numel() != ranks * expected:
            raise PayloadError(
                f"{self.name}: expected {ranks} times {expected} bytes, got {received.numel()}"
            )
        payloads = received.view(ranks, expected)
        started = time.perf_counter()
        try:
            flagged = any_nonfinite(payloads.numpy())
            average.decode(self._kernels, payloads, 1 / ranks)
        except PayloadError as error:
            raise PayloadError(f"{self.name}, as its owner: {error}") from None
        decoded = time.perf_counter()
        if self._owner_step is not None and not flagged:
            self._run_owner_step(average.flat)
        size = self._collectives.size
        stream = two_shot.second_stream(self._collectives.rank, size)
        average.encode(self._kernels, self._noise(stream))
        self._seconds_decoding += decoded - started
        self._seconds_encoding += time.perf_counter() - decoded

    def _run_owner_step(self, average: torch.Tensor) -> None:
        assert self._owner_step is not None
        self._state_before = copy.deepcopy(self._owned.state)
        average.div_(self._loss_scale)
        self._owner_step(average, self._owned.state)
        average.mul_(self._loss_scale)

    def _take_averages(self, gathered: torch.Tensor) -> None:
        if gathered.numel() != sum(self._sizes):
            raise PayloadError(
                f"{self.name}: expected {sum(self._sizes)} bytes, got {gathered.numel()}"
            )
        self._averages = list(gathered.split(self._sizes))
        for owner, payload in enumerate(self._averages):
            if is_failure(payload):
                raise ExchangeError(
                    f"{self.name}: expected an average from every rank, got none from rank {owner}, whose "
                    f"own error says why"
                )

    def _encode_parts(self, residual: torch.Tensor | None) -> list[Piece]:
        started = time.perf_counter()
        size, rank = self._collectives.size, self._collectives.rank
        parts = []
        for owner, payload in enumerate(self._message.split(self._sizes)):
            begin, end = self._shards.of(owner)
            if begin == end:
                continue
            rest = None if residual is None else residual[begin:end]
            part = self._piece(begin, end, self.flat[begin:end], payload, rest)
            part.encode(self._kernels, self._noise(two_shot.first_stream(rank, owner, size)))
            parts.append(part)
        self._seconds_encoding += time.perf_counter() - started
        return parts

    def _piece(
        self,
        begin: int,
        end: int,
        flat: torch.Tensor,
        payload: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Piece:
        return Piece(self._route, (end - begin,), self._key.step, flat, payload, residual)

    def _noise(self, stream: int) -> NoiseKey:
        return replace(self._key, rank=stream)
