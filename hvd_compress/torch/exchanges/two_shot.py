"""The two-shot exchange: parts to their owners, averages from them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.exchange import two_shot
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.exchange.shards import Shards
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import (
    Exchange,
    Refused,
    Relay,
    Transfer,
    Uncompressed,
    is_failure,
)
from hvd_compress.torch.exchanges.bundles import Bundles
from hvd_compress.torch.owner_steps import OwnerStep
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import any_nonfinite
from hvd_compress.torch_common.pieces import Piece
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
        self._bundles = Bundles(collectives)

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        two_shot.check(slot.name, route.codec, self._shards(slot))

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`."""
        self._own(slot, gradient)
        if slot.route.feedback.enabled:
            self.encoder.residual(slot, gradient.device)
        else:
            self.encoder.release_residual(slot, gradient)
        shots = Shots(
            self.collectives,
            self._bundles,
            self.encoder,
            self._owner_step,
            slot,
            gradient,
            self._shards(slot),
        )
        slot.step += 1
        return shots

    def prepare(self, slots: Sequence[Slot]) -> None:
        """See :meth:`Exchange.prepare`: makes up bundles."""
        self._bundles.plan([(slot.index, slot.count) for slot in slots])

    def flush(self) -> list[Relay]:
        """See :meth:`Exchange.flush`."""
        return self._bundles.flush()

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        begin, end = self._shards(slot).of(self.collectives.rank)
        return Owned(begin, end, weight=self.collectives.size)

    def _shards(self, slot: Slot) -> Shards:
        return Shards(slot.count, self.collectives.size, slot.index)


class Shots(Transfer):
    """A gradient's shards, and their averages; a :class:`Bundle` sends them.

    An owner that fails sends zeros, so that no rank waits for it in vain.

    Args:
        collectives: the ranks.
        bundles: with which others it travels.
        encoder: what this rank encodes with.
        owner_step: see :class:`TwoShot`.
        slot: whose gradient; its residuals are in the gradient's units.
        gradient: of the slot's shape.
        shards: who owns what of it.
    """

    def __init__(
        self,
        collectives: Collectives,
        bundles: Bundles,
        encoder: Encoder,
        owner_step: OwnerStep | None,
        slot: Slot,
        gradient: torch.Tensor,
        shards: Shards,
    ) -> None:
        super().__init__(slot.name, gradient.reshape(-1))
        self.error = None
        self.index = slot.index
        self._collectives = collectives
        self._bundles = bundles
        assert slot.owned is not None
        self._kernels = encoder.kernels
        self._owner_step = owner_step
        self._owned = slot.owned
        self._shards = shards
        self._route = slot.route
        self._key = NoiseKey(encoder.seed, 0, slot.index, slot.step)
        self._loss_scale = encoder.loss_scale()
        self.sizes = shards.payload_bytes(slot.route.codec)
        self.message = torch.empty(sum(self.sizes), dtype=torch.uint8, device=gradient.device)
        self._seconds_encoding = self._seconds_decoding = 0.0
        self._parts = self._encode_parts(slot.residual)
        self._average: Piece | None = None
        self._state_before: dict[str, Any] | None = None
        self._averages: list[torch.Tensor] | None = None

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        return self._bundles.add(self)

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Transfer.payloads`: what was flagged in the first shot is in the second."""
        assert self._averages is not None
        return [payload[None] for payload in self._averages if len(payload)]

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """See :meth:`Transfer.take_back`; the owner's residual and state as well."""
        for part in self._parts:
            part.take_back(self._kernels, when)
        if self._average is not None:
            self._average.take_back(self._kernels, when)
        # The state is whatever the user's step keeps: only the host can put it back.
        if self._state_before is not None and (when is None or bool(when.item())):
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
        own = self.sizes[self._collectives.rank]
        counters.encoded_elements += self.flat.numel()
        counters.add_alltoall(sum(self.sizes), own)
        counters.add_allgather(self._collectives.size, own)
        counters.encode_seconds += self._seconds_encoding
        counters.decode_seconds += self._seconds_decoding

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`; an owner's step cannot be left out."""
        if self._owner_step is None:
            return Uncompressed(self._collectives, self)
        return Refused(
            self._collectives,
            self,
            f"{self.name}: expected all {self._collectives.size} ranks to take part in a step with an "
            f"owner_step, got some that have called hvd.join(); the parts that they own cannot be stepped",
        )

    def average(self, payloads: torch.Tensor) -> torch.Tensor:
        """The owner's work between the shots.

        Args:
            payloads: all ranks' payloads of this rank's shard, shape=(ranks, bytes), uint8.

        Returns:
            The average's payload, shape=(bytes,), uint8; zeros if :attr:`error` says why there is none.
        """
        size, device = self.sizes[self._collectives.rank], self.flat.device
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        if len(payload):
            owned = self._owned
            flat = torch.empty(owned.count, device=device)
            average = self._piece(owned.begin, owned.end, flat, payload, owned.residual)
            try:
                self._make_average(average, payloads)
                self._average = average
            except Exception as error:
                self.error = error
                payload.zero_()
        return payload

    def take(self, averages: list[torch.Tensor]) -> None:
        """Takes the averages' payloads, one of each rank."""
        self._averages = averages
        for owner, payload in enumerate(averages):
            if is_failure(payload):
                self.error = self.error or ExchangeError(
                    f"{self.name}: expected an average from every rank, got none from rank {owner}, whose "
                    f"own error says why"
                )

    def _make_average(self, average: Piece, payloads: torch.Tensor) -> None:
        ranks = self._collectives.size
        started = time.perf_counter()
        try:
            average.decode(self._kernels, payloads, 1 / ranks)
        except PayloadError as error:
            raise PayloadError(f"{self.name}, as its owner: {error}") from None
        decoded = time.perf_counter()
        if self._owner_step is not None and not any_nonfinite(payloads):
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

    def _encode_parts(self, residual: torch.Tensor | None) -> list[Piece]:
        started = time.perf_counter()
        size, rank = self._collectives.size, self._collectives.rank
        parts = []
        for owner, payload in enumerate(self.message.split(self.sizes)):
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
