"""Short measurements of the links and the codecs, for the planner."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hvd_compress.codecs import NoiseKey
from hvd_compress.exchange.counters import Counters
from hvd_compress.kernels.interface import Kernels
from hvd_compress.planner.measured import HALF, Coding
from hvd_compress.planner.probing import MEETING, SMALL, SMALL_BYTES, Prober, Work
from hvd_compress.torch.collectives import Collectives, Handle

_PAUSE = 50e-6
"""Between two looks at a collective: times are short here, and so must be the look-out for their end."""


class TorchProber(Prober):
    """Implements :class:`Prober`.

    Args:
        collectives: the ranks, more than one.
        kernels: encode and decode.
        largest: elements of the largest gradient.
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
        super().__init__(collectives.size, largest, counters)
        self._collectives = collectives
        self._kernels = kernels
        self._device = device
        messages = {
            MEETING: torch.zeros(SMALL_BYTES // 4),
            SMALL: torch.zeros(SMALL_BYTES // 4),
            "allreduce": torch.zeros(self.message_bytes("allreduce") // 4),
            # Zeros would be added faster than gradients.
            HALF: _normal(self.message_bytes(HALF) // 2).half(),
            "allgather": torch.zeros(self.message_bytes("allgather"), dtype=torch.uint8),
            "alltoall": torch.zeros(self.message_bytes("alltoall"), dtype=torch.uint8),
        }
        self._messages = {kind: message.to(device) for kind, message in messages.items()}

    def _run(self, what: str) -> None:
        handle = self._start(what)
        while not self._collectives.done(handle):
            time.sleep(_PAUSE)
        self._collectives.wait(handle)

    def _work(self, coding: Coding, shape: tuple[int, ...]) -> tuple[Work, Work]:
        codec, feedback = coding
        gradient = _normal(self.elements).to(self._device)
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

        return encode, decode

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _start(self, what: str) -> Handle:
        message = self._messages[what]
        name = what if what in (MEETING, SMALL) else f"probe {what}"
        if what == "allgather":
            return self._collectives.gather(message, name)
        if what == "alltoall":
            size = self._collectives.size
            return self._collectives.distribute(message, [message.numel() // size] * size, name)
        return self._collectives.sum(message, name)


def _normal(count: int) -> torch.Tensor:
    """Random numbers that leave the generator of the training alone."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0))
