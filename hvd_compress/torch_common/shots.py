"""One gradient in two shots: parts for their owners, averages from them; whoever sends them."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.codecs.payload import HEADER_BYTES
from hvd_compress.exchange import two_shot
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.shards import Shards, tells_of_a_failure
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.executors import any_nonfinite
from hvd_compress.torch_common.pieces import Piece
from hvd_compress.torch_common.slots import Owned, Slot

OwnerWork = Callable[[torch.Tensor, dict[str, Any]], None]
"""What the owner of a part does with its average, in place; the state is kept from step to step."""


def shards_of(slot: Slot, size: int) -> Shards:
    """Who owns what of a parameter, among that many ranks."""
    return Shards(slot.count, size, slot.index)


def owned_of(slot: Slot, rank: int, size: int) -> Owned:
    """An empty record of what a rank owns of a parameter."""
    begin, end = shards_of(slot, size).of(rank)
    return Owned(begin, end, weight=size)


class Shots:
    """A gradient's shards, and their averages.

    Encodes the shards when it is made; residuals and the position in the noise move on. An owner that fails
    sends zeros, so that no rank waits for it in vain.

    Args:
        encoder: what this rank encodes with.
        size: ranks.
        slot: whose gradient; its residuals are there, in the gradient's units.
        gradient: of the slot's shape.
        owner_step: what owners do with the averages before they send them, or None.

    Attributes:
        name: the parameter's.
        index: the parameter's number.
        flat: the gradient's elements, shape=(n,), as they were given; the result is written over them.
        message: the payloads for all owners, one after the other, shape=(bytes,), uint8.
        sizes: of these, one a rank.
        error: what went wrong.
    """

    error: Exception | None

    def __init__(
        self,
        encoder: Encoder,
        size: int,
        slot: Slot,
        gradient: torch.Tensor,
        owner_step: OwnerWork | None = None,
    ) -> None:
        assert slot.owned is not None
        self.name = slot.name
        self.index = slot.index
        self.flat = gradient.reshape(-1)
        self.error = None
        self._kernels = encoder.kernels
        self._rank, self._size = encoder.rank, size
        self._owner_step = owner_step
        self._owned = slot.owned
        self._shards = shards_of(slot, size)
        self._route = slot.route
        self._key = NoiseKey(encoder.seed, 0, slot.index, slot.step)
        self._loss_scale = encoder.loss_scale
        self.sizes = self._shards.payload_bytes(slot.route.codec)
        self.message = torch.empty(sum(self.sizes), dtype=torch.uint8, device=gradient.device)
        self._seconds_encoding = self._seconds_decoding = 0.0
        self._parts = self._encode_parts(slot.residual)
        self._average: Piece | None = None
        self._state_before: dict[str, Any] | None = None
        self._averages: list[torch.Tensor] | None = None
        slot.step += 1

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """The averages' payloads, each shape=(1, bytes): what was flagged in the first shot is in them."""
        assert self._averages is not None
        return [payload[None] for payload in self._averages if len(payload)]

    def take_back(
        self, when: torch.Tensor | None = None, gradient: torch.Tensor | None = None
    ) -> None:
        """Undoes what sending did to this rank's residuals and to the state of its step.

        Args:
            when: as for :meth:`hvd_compress.torch_common.pieces.Piece.take_back`.
            gradient: the gradient's elements, shape=(n,), where ``flat`` does not hold them any more.
        """
        for begin, part in self._parts:
            end = begin + len(part.flat)
            part.take_back(self._kernels, when, None if gradient is None else gradient[begin:end])
        if self._average is not None:
            self._average.take_back(self._kernels, when)
        # The state is whatever the user's step keeps: only the host can put it back.
        if self._state_before is not None and (when is None or bool(when.item())):
            self._owned.state = self._state_before

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients to ``flat``.

        Raises:
            PayloadError: a payload was altered on its way.
        """
        assert self._averages is not None
        for owner, payload in enumerate(self._averages):
            if not len(payload):
                continue
            begin, end = self._shards.of(owner)
            piece = self._piece(begin, end, self.flat[begin:end], payload, None)
            try:
                piece.decode(self._kernels, payload[None], scale * self._size)
            except PayloadError as error:
                # The kernels count the payloads of one call, and here every call has one.
                what = str(error).removeprefix("rank 0's ")
                raise PayloadError(f"{self.name}: rank {owner}'s average: {what}") from None

    def count(self, counters: Counters) -> None:
        """Adds what was sent and computed to the counters."""
        own = self.sizes[self._rank]
        counters.add_alltoall(sum(self.sizes), own)
        counters.add_allgather(self._size, own)
        self.count_coding(counters)

    def count_coding(self, counters: Counters) -> None:
        """Adds what was computed alone."""
        counters.encoded_elements += self.flat.numel()
        counters.encode_seconds += self._seconds_encoding
        counters.decode_seconds += self._seconds_decoding

    def average(self, payloads: torch.Tensor) -> torch.Tensor:
        """The owner's work between the shots.

        Args:
            payloads: all ranks' payloads of this rank's shard, shape=(ranks, bytes), uint8.

        Returns:
            The average's payload, shape=(bytes,), uint8; zeros if :attr:`error` says why there is none.
        """
        size, device = self.sizes[self._rank], self.flat.device
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
        """Takes the averages' payloads, one of each rank.

        Where the host must not look at them, an owner's failure is found when they are decoded.
        """
        self._averages = averages
        for owner, payload in enumerate(averages):
            if self._kernels.readable(payload) and is_failure(payload):
                self.error = self.error or ExchangeError(
                    f"{self.name}: expected an average from every rank, got none from rank {owner}, whose "
                    f"own error says why"
                )

    def _make_average(self, average: Piece, payloads: torch.Tensor) -> None:
        started = time.perf_counter()
        try:
            average.decode(self._kernels, payloads, 1 / self._size)
        except PayloadError as error:
            raise PayloadError(f"{self.name}, as its owner: {error}") from None
        decoded = time.perf_counter()
        if self._owner_step is not None and not any_nonfinite(payloads):
            self._run_owner_step(average.flat)
        stream = two_shot.second_stream(self._rank, self._size)
        average.encode(self._kernels, self._noise(stream))
        self._seconds_decoding += decoded - started
        self._seconds_encoding += time.perf_counter() - decoded

    def _run_owner_step(self, average: torch.Tensor) -> None:
        assert self._owner_step is not None
        self._state_before = copy.deepcopy(self._owned.state)
        average.div_(self._loss_scale)
        self._owner_step(average, self._owned.state)
        average.mul_(self._loss_scale)

    def _encode_parts(self, residual: torch.Tensor | None) -> list[tuple[int, Piece]]:
        started = time.perf_counter()
        parts = []
        for owner, payload in enumerate(self.message.split(self.sizes)):
            begin, end = self._shards.of(owner)
            if begin == end:
                continue
            rest = None if residual is None else residual[begin:end]
            part = self._piece(begin, end, self.flat[begin:end], payload, rest)
            part.encode(
                self._kernels, self._noise(two_shot.first_stream(self._rank, owner, self._size))
            )
            parts.append((begin, part))
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
        if not self._route.feedback.enabled:
            residual = None  # What an earlier codec left waits to be released.
        return Piece(self._route, (end - begin,), self._key.step, flat, payload, residual)

    def _noise(self, stream: int) -> NoiseKey:
        return dataclasses.replace(self._key, rank=stream)


def is_failure(payload: torch.Tensor) -> bool:
    """Whether zeros came in this payload's place, shape=(bytes,), because its sender had an error."""
    return bool(len(payload)) and tells_of_a_failure(payload[:HEADER_BYTES].cpu().numpy().tobytes())
