"""The integer sum: norms first, then levels, both in Horovod's own allreduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.kernels.interface import LevelKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Exchange, Relay, Transfer, Uncompressed
from hvd_compress.torch_common import level_sums
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.level_sums import LevelSum
from hvd_compress.torch_common.slots import Slot


class IntegerSum(Exchange):
    """Horovod adds the ranks' levels as integers (TernGrad, section 3.1): its rings, its fusion.

    Args:
        collectives: the ranks.
        encoder: what this rank encodes with.
        kernels: make levels and read their sums.
    """

    def __init__(self, collectives: Collectives, encoder: Encoder, kernels: LevelKernels) -> None:
        super().__init__(collectives, encoder)
        self._kernels = kernels

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        level_sums.check(slot, route, self.collectives.size)

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`; levels are made when the ranks' norms are known."""
        self._own(slot, gradient)
        if slot.route.feedback.enabled:
            self.encoder.residual(slot, gradient.device)
        else:
            self.encoder.release_residual(slot, gradient)
        return Levels(self.collectives, self.encoder, self._kernels, slot, gradient)


class Levels(LevelSum, Transfer, Relay):
    """Two sums: the largest norms, and the levels that are made with them.

    Args:
        collectives: the ranks.
        encoder: what this rank encodes with.
        kernels: make levels and read their sums.
        slot: whose gradient; its residual is there, in the gradient's units.
        gradient: of the slot's shape.
    """

    def __init__(
        self,
        collectives: Collectives,
        encoder: Encoder,
        kernels: LevelKernels,
        slot: Slot,
        gradient: torch.Tensor,
    ) -> None:
        Relay.__init__(self, collectives)
        LevelSum.__init__(self, encoder, kernels, collectives.size, slot, gradient)
        self._next: Callable[[torch.Tensor], None] = self._send_levels

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        self.handle = self._collectives.maximum(self.norms, f"{self.name} norms")
        return self

    @property
    def payloads(self) -> Sequence[torch.Tensor] | None:
        """See :attr:`Transfer.payloads`."""
        return None if self.nonfinite else []

    def take_back(
        self, when: torch.Tensor | None = None, *, gradient: torch.Tensor | None = None
    ) -> None:
        """See :meth:`Transfer.take_back`."""
        assert when is None, "norms are known to the host"
        super().take_back(gradient=gradient)

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        self.count_coding(counters)
        counters.add_allreduce(self._collectives.size, 4 * self.norms.numel())
        counters.add_allreduce(self._collectives.size, 4 * self.words)

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`; the residual has not been touched yet."""
        return Uncompressed(self._collectives, self)

    def _arrived(self, result: torch.Tensor) -> None:
        self._next(result)

    def _send_levels(self, norms: torch.Tensor) -> None:
        message = self.make_levels(norms)
        self._next = self.take
        self.handle = self._collectives.sum(message, f"{self.name} levels")
