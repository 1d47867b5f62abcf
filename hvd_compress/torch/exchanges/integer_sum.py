"""The integer sum: norms first, then levels, both in Horovod's own allreduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hvd_compress.codecs import LevelCodec, NoiseKey
from hvd_compress.exchange import integer_sum
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.kernels.interface import LevelKernels
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Exchange, Relay, Transfer, Uncompressed
from hvd_compress.torch_common.encoder import Encoder
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
        if slot.parameter.device.type != "cpu":
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of the CPU for exchange='integer_sum', "
                f"got one on {slot.parameter.device}: its kernels are for CPUs; use another exchange"
            )
        integer_sum.check(slot.name, route.codec, self.collectives.size)

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`; levels are made when the ranks' norms are known."""
        self._own(slot, gradient)
        residual = None
        if slot.route.feedback.enabled:
            residual = self.encoder.residual(slot, gradient.device)
        else:
            self.encoder.release_residual(slot, gradient)
        noise = NoiseKey(self.encoder.seed, self.encoder.rank, slot.index, slot.step)
        slot.step += 1
        codec = integer_sum.check(slot.name, slot.route.codec, self.collectives.size)
        return Levels(self.collectives, self._kernels, slot, codec, gradient, residual, noise)


class Levels(Transfer, Relay):
    """Two sums: the largest norms, and the levels that are made with them.

    A rank that fails between the two sends zeros, which add nothing, and does not count itself. Then all
    ranks know, and none waits for it.

    Args:
        collectives: the ranks.
        kernels: make levels and read their sums.
        slot: whose gradient.
        codec: the slot's.
        gradient: of the slot's shape.
        residual: the slot's, in the gradient's units; None without error feedback.
        noise: this rank's position in the noise.
    """

    def __init__(
        self,
        collectives: Collectives,
        kernels: LevelKernels,
        slot: Slot,
        codec: LevelCodec,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        noise: NoiseKey,
    ) -> None:
        Transfer.__init__(self, slot.name, gradient.reshape(-1))
        Relay.__init__(self, collectives)
        self._kernels = kernels
        self._codec = codec
        self._shape = slot.shape
        self._feedback = slot.route.feedback
        self._residual = residual
        self._noise = noise
        self._bits = integer_sum.bits_of(codec, collectives.size)
        self._norms = torch.empty(codec.layout(slot.shape).scales)
        self._next: Callable[[torch.Tensor], None] = self._encode
        self._words: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        started = time.perf_counter()
        kernels.norms(
            codec, self._shape, self.flat, self._norms, feedback=self._feedback, residual=residual
        )
        self._seconds = time.perf_counter() - started

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        self.handle = self._collectives.maximum(self._norms, f"{self.name} norms")
        return self

    @property
    def payloads(self) -> Sequence[torch.Tensor] | None:
        """See :attr:`Transfer.payloads`: a bucket that is not finite has an infinite norm."""
        return None if bool(self._norms.isinf().any()) else []

    def take_back(self, when: torch.Tensor | None = None) -> None:
        """See :meth:`Transfer.take_back`."""
        assert when is None, "norms are known to the host"
        if self._words is not None and self._residual is not None:
            self._kernels.take_back(
                self._codec,
                self._shape,
                self.flat,
                self._residual,
                self._norms,
                self._words,
                bits=self._bits,
                feedback=self._feedback,
            )

    def write(self, scale: float) -> None:
        """See :meth:`Transfer.write`."""
        assert self._sum is not None
        self._kernels.decode(
            self._codec,
            self._shape,
            self._norms,
            self._sum,
            self.flat,
            bits=self._bits,
            scale=scale,
        )

    def count(self, counters: Counters) -> None:
        """See :meth:`Transfer.count`."""
        size = self._collectives.size
        words = integer_sum.message_words(self._codec, self._shape, size)
        counters.encoded_elements += self.flat.numel()
        counters.encode_seconds += self._seconds
        counters.add_allreduce(size, 4 * self._norms.numel())
        counters.add_allreduce(size, 4 * words)

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`; the residual has not been touched yet."""
        return Uncompressed(self._collectives, self)

    def _arrived(self, result: torch.Tensor) -> None:
        self._next(result)

    def _encode(self, norms: torch.Tensor) -> None:
        message = torch.zeros(
            integer_sum.message_words(self._codec, self._shape, self._collectives.size),
            dtype=torch.int32,
        )
        started = time.perf_counter()
        try:
            self._norms = norms
            self._kernels.encode(
                self._codec,
                self._shape,
                self.flat,
                norms,
                message[:-1],
                bits=self._bits,
                feedback=self._feedback,
                residual=self._residual,
                noise=self._noise,
            )
        except Exception as error:
            self.error = error
            message.zero_()
        else:
            self._words = message[:-1]
            message[-1] = 1
        self._seconds += time.perf_counter() - started
        self._next = self._take
        self.handle = self._collectives.sum(message, f"{self.name} levels")

    def _take(self, message: torch.Tensor) -> None:
        counted, size = int(message[-1]), self._collectives.size
        if counted != size:
            raise ExchangeError(
                f"{self.name}: expected the levels of all {size} ranks, got those of {counted}; the own "
                f"errors of the others say why"
            )
        self._sum = message[:-1]
