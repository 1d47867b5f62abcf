"""The simplest exchange: every rank gets every rank's payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route, check_gather
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Exchange, Relay, Transfer, Uncompressed
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.pieces import Coded
from hvd_compress.torch_common.slots import Slot


class Allgather(Exchange):
    """Every rank decodes the payloads of all: its traffic grows with the number of ranks."""

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        check_gather(slot.name, route.codec.payload_bytes(slot.shape), self.collectives.size)

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`."""
        self._own(slot, gradient)
        if not slot.route.feedback.enabled:
            self.encoder.release_residual(slot, gradient)
        size = slot.route.codec.payload_bytes(slot.shape)
        payload = torch.empty(size, dtype=torch.uint8, device=gradient.device)
        coded = self.encoder.encode(slot, gradient, payload)
        return Gather(self.collectives, self.encoder.kernels, coded)


class Gather(Transfer, Relay):
    """One gather of whole payloads; each rank decodes and adds those of all ranks, in rank order.

    Args:
        collectives: the ranks.
        kernels: decode the payloads.
        coded: the gradient, encoded.
    """

    single: ClassVar[bool] = True

    def __init__(self, collectives: Collectives, kernels: Executors, coded: Coded) -> None:
        Transfer.__init__(self, coded.slot.name, coded.flat)
        Relay.__init__(self, collectives)
        self._kernels = kernels
        self._coded = coded
        self._payloads: torch.Tensor | None = None

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        self.handle = self._collectives.gather_alike(self._coded.payload, self.name)
        return self

    @property
    def payloads(self) -> Sequence[torch.Tensor]:
        """See :attr:`Transfer.payloads`."""
        assert self._payloads is not None
        return [self._payloads]

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """See :meth:`Transfer.take_back`."""
        self._coded.take_back(self._kernels, when)

    def write(self, scale: float) -> None:
        """See :meth:`Transfer.write`."""
        assert self._payloads is not None
        self._coded.decode(self._kernels, self._payloads, scale)

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        self._coded.count(counters)
        counters.add_allgather(self._collectives.size, self._coded.payload.numel())

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`."""
        return Uncompressed(self._collectives, self)

    def _arrived(self, result: torch.Tensor) -> None:
        ranks, expected = self._collectives.size, self._coded.payload.numel()
        if result.numel() != ranks * expected:
            raise PayloadError(
                f"{self.name}: expected {ranks} times {expected} bytes, got {result.numel()}"
            )
        self._payloads = result.view(ranks, expected)
