"""One gradient as levels that ranks add up: norms first, then levels; whoever sends them."""

from __future__ import annotations

import time

import torch

from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange import integer_sum
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.errors import ExchangeError
from hvd_compress.exchange.routing import Route
from hvd_compress.kernels.interface import LevelKernels
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.slots import Slot


def check(slot: Slot, route: Route, size: int) -> None:
    """Raises ``ValueError`` where a parameter's gradients cannot be added up as levels."""
    if slot.parameter.device.type != "cpu":
        raise ValueError(
            f"{slot.name}: expected a parameter in the memory of the CPU for exchange='integer_sum', got "
            f"one on {slot.parameter.device}: its kernels are for CPUs; use another exchange"
        )
    integer_sum.check(slot.name, route.codec, size)


class LevelSum:
    """A gradient's norms, its levels, and the ranks' sum of these.

    Takes the norms when it is made; the position in the noise moves on. A rank that fails, then or between
    the two sums, sends zeros, which add nothing, and does not count itself. So all ranks know, and none
    waits for it.

    Args:
        encoder: what this rank encodes with.
        kernels: make levels and read their sums.
        size: ranks.
        slot: whose gradient; its residual is there, in the gradient's units.
        gradient: of the slot's shape.

    Attributes:
        name: the parameter's.
        flat: the gradient's elements, shape=(n,), as they were given; the result is written over them.
        norms: shape=(buckets,), float32: this rank's; once levels were made, the largest of all ranks'.
        words: words of 4 bytes that a rank adds to the sum.
        error: what went wrong.
    """

    error: Exception | None

    def __init__(
        self,
        encoder: Encoder,
        kernels: LevelKernels,
        size: int,
        slot: Slot,
        gradient: torch.Tensor,
    ) -> None:
        self.name = slot.name
        self.flat = gradient.reshape(-1)
        self.error = None
        self._kernels = kernels
        self._size = size
        self._codec = integer_sum.check(slot.name, slot.route.codec, size)
        self._shape = slot.shape
        self._feedback = slot.route.feedback
        # What an earlier codec left waits to be released.
        self._residual = slot.residual if self._feedback.enabled else None
        self._noise = NoiseKey(encoder.seed, encoder.rank, slot.index, slot.step)
        slot.step += 1
        self._bits = integer_sum.bits_of(self._codec, size)
        self.words = integer_sum.message_words(self._codec, self._shape, size)
        self._levels: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        started = time.perf_counter()
        self.norms = self._take_norms()
        self._seconds = time.perf_counter() - started

    @property
    def nonfinite(self) -> bool:
        """Whether a rank's gradient was not finite: its bucket has an infinite norm."""
        return bool(self.norms.isinf().any())

    def make_levels(self, norms: torch.Tensor) -> torch.Tensor:
        """Encodes with the ranks' largest norms; the residual moves on.

        Never raises where another rank would wait for it: :attr:`error` says what went wrong.

        Args:
            norms: shape=(buckets,), float32.

        Returns:
            What is to be added up, shape=(words,), int32: the levels, and a word that counts the ranks. It
            is needed to take residuals back, so that the sum must not be written over it.
        """
        message = torch.zeros(self.words, dtype=torch.int32)
        self.norms = norms
        if self.error is not None:
            return message
        started = time.perf_counter()
        try:
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
            self._levels = message[:-1]
            message[-1] = 1
        self._seconds += time.perf_counter() - started
        return message

    def take(self, message: torch.Tensor) -> None:
        """Takes the sum of all ranks' levels, shape=(words,), int32."""
        counted = int(message[-1])
        if counted != self._size:
            self.error = self.error or ExchangeError(
                f"{self.name}: expected the levels of all {self._size} ranks, got those of {counted}; the "
                f"own errors of the others say why"
            )
        self._sum = message[:-1]

    def take_back(self, *, gradient: torch.Tensor | None = None) -> None:
        """Undoes what :meth:`make_levels` did to the residual.

        Args:
            gradient: the gradient's elements, shape=(n,), where ``flat`` does not hold them any more.
        """
        if self._levels is not None and self._residual is not None:
            self._kernels.take_back(
                self._codec,
                self._shape,
                self.flat if gradient is None else gradient,
                self._residual,
                self.norms,
                self._levels,
                bits=self._bits,
                feedback=self._feedback,
            )

    def write(self, scale: float) -> None:
        """Writes ``scale`` times the sum of the ranks' gradients to ``flat``."""
        assert self._sum is not None
        self._kernels.decode(
            self._codec, self._shape, self.norms, self._sum, self.flat, bits=self._bits, scale=scale
        )

    def count_coding(self, counters: Counters) -> None:
        """Adds what was computed to the counters."""
        counters.encoded_elements += self.flat.numel()
        counters.encode_seconds += self._seconds

    def _take_norms(self) -> torch.Tensor:
        norms = torch.zeros(self._codec.layout(self._shape).scales)
        try:
            self._kernels.norms(
                self._codec,
                self._shape,
                self.flat,
                norms,
                feedback=self._feedback,
                residual=self._residual,
            )
        except Exception as error:
            self.error = error
            norms.zero_()
        return norms
