"""Short measurements of the links and the codecs, for the planner."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange.counters import Counters
from hvd_compress.kernels.interface import Kernels
from hvd_compress.planner.measured import HALF, Coding
from hvd_compress.torch.collectives import Collectives, Handle

_BYTES = 2**19
"""What each rank sends in a probe: far more than the burst that a rate limit lets pass."""

_ELEMENTS = 2**20
"""Of the tensor that codecs are measured with: more than a cache close to the processor holds."""

_COLUMNS = 256
"""Of the matrix that stands for gradients where a codec looks at rows or columns."""

_REPEATS = 2
_PAUSE = 50e-6
"""Between two looks at a collective: times are short here, and so must be the look-out for their end."""


class Prober:
    """Measures on this rank; the ranks' numbers still have to be brought together.

    Args:
        collectives: the ranks, more than one.
        kernels: encode and decode.
        largest: elements of the largest gradient: probes are no larger than what will be sent.
        device: that gradients are on.
        counters: count what the probes send.
    """

    def __init__(
        self,
        collectives: Collectives,
        kernels: Kernels,
        largest: int,
        device: torch.device,
        counters: Callable[[], Counters],
    ) -> None:
        self._collectives = collectives
        self._kernels = kernels
        self._counters = counters
        self._device = device
        self._elements = min(_ELEMENTS, _COLUMNS * max(1, largest // _COLUMNS))
        size = collectives.size
        # Parts of a multiple of 16 bytes, so that each collective sends exactly as much as the others.
        part = 16 * -(-min(_BYTES, 4 * largest) // (32 * (size - 1)))
        self.sent = 2 * part * (size - 1)
        """Bytes that each rank sends in each large collective of :meth:`links`."""
        whole = size * part
        messages = {
            "allreduce": torch.zeros(whole // 4),
            # Zeros would be added faster than gradients.
            HALF: _normal(whole // 2).half(),
            "allgather": torch.zeros(2 * part, dtype=torch.uint8),
            "alltoall": torch.zeros(2 * whole, dtype=torch.uint8),
        }
        self._messages = {kind: message.to(device) for kind, message in messages.items()}
        self._small = torch.zeros(4, device=device)

    def links(self, kinds: Sequence[str]) -> list[float]:
        """Seconds of a small allreduce, and of a large collective of each kind, in that order.

        Waits for all ranks. They meet in a sum, which is not timed, so that nobody's delay counts.

        Args:
            kinds: some of :data:`~hvd_compress.planner.measured.KINDS`, the same on every rank.
        """
        self._wait(self._collectives.sum(self._small, "meeting before probe"))
        size, counters = self._collectives.size, self._counters()
        counters.add_allreduce(size, 8 * self._small.numel())
        times = [self._timed(lambda: self._collectives.sum(self._small, "probe"))]
        for kind in kinds:
            times.append(self._timed(functools.partial(self._start, kind)))
            counters.message_bytes += self._messages[kind].nbytes
            counters.wire_bytes += self.sent
        return times

    def speeds(self, codings: Sequence[Coding]) -> list[tuple[float, float]]:
        """Seconds an element to encode and to decode, for each codec."""
        gradient = _normal(self._elements).to(self._device)
        return [self._speed(coding, gradient) for coding in codings]

    def _speed(self, coding: Coding, gradient: torch.Tensor) -> tuple[float, float]:
        codec, feedback = coding
        shape: tuple[int, ...] = (len(gradient),)
        if codec.shaped and len(gradient) % _COLUMNS == 0:
            shape = (len(gradient) // _COLUMNS, _COLUMNS)
        payload = torch.empty(codec.payload_bytes(shape), dtype=torch.uint8, device=self._device)
        residual = torch.zeros_like(gradient) if feedback.enabled else None
        out = torch.empty_like(gradient)

        def encode() -> None:
            self._kernels.encode(
                codec,
                shape,
                gradient,
                payload,
                feedback=feedback,
                residual=residual,
                noise=NoiseKey(0),
            )

        def decode() -> None:
            self._kernels.decode_sum(codec, shape, payload[None], out, step=0)

        encoding, decoding = self._fastest(encode), self._fastest(decode)
        return encoding / len(gradient), decoding / len(gradient)

    def _start(self, kind: str) -> Handle:
        message, name = self._messages[kind], f"probe {kind}"
        if kind == "allgather":
            return self._collectives.gather(message, name)
        if kind == "alltoall":
            size = self._collectives.size
            return self._collectives.distribute(message, [message.numel() // size] * size, name)
        return self._collectives.sum(message, name)

    def _timed(self, start: Callable[[], Handle]) -> float:
        started = time.perf_counter()
        self._wait(start())
        self._settle()
        return time.perf_counter() - started

    def _fastest(self, work: Callable[[], None]) -> float:
        seconds = []
        for _ in range(_REPEATS):
            self._settle()
            started = time.perf_counter()
            work()
            self._settle()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def _settle(self) -> None:
        """Waits for what a device does behind the host's back."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _wait(self, handle: Handle) -> None:
        while not self._collectives.done(handle):
            time.sleep(_PAUSE)
        self._collectives.wait(handle)


def _normal(count: int) -> torch.Tensor:
    """Random numbers that leave the generator of the training alone."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))
