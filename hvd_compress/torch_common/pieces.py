"""Numbers between encoding and decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvd_compress.codecs import NoiseKey, PayloadError
from hvd_compress.exchange.counters import Counters
from hvd_compress.exchange.routing import Route
from hvd_compress.torch_common.executors import Executors
from hvd_compress.torch_common.slots import Slot


@dataclass(eq=False)
class Piece:
    """Numbers that are encoded as a tensor of their own: a gradient, or a range of one.

    Attributes:
        route: how they are encoded.
        shape: the tensor's.
        step: the position in the noise.
        flat: the numbers in row-major order, shape=(n,).
        payload: shape=(bytes,), uint8.
        residual: shape=(n,), float32; None without error feedback.
    """

    route: Route
    shape: tuple[int, ...]
    step: int
    flat: torch.Tensor
    payload: torch.Tensor
    residual: torch.Tensor | None

    def encode(self, kernels: Executors, noise: NoiseKey) -> None:
        """Writes the payload and moves the residual on."""
        kernels.encode(
            self.route.codec,
            self.shape,
            self.flat,
            self.payload,
            feedback=self.route.feedback,
            residual=self.residual,
            noise=noise,
        )

    def take_back(
        self,
        kernels: Executors,
        when: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> None:
        """Undoes what :meth:`encode` did to the residual; ``payload`` has not changed.

        Args:
            kernels: encoded it.
            when: a word on the numbers' device, shape=(1,), int32; nothing is undone where it holds 0.
            numbers: those that were encoded, shape=(n,), where ``flat`` does not hold them any more.
        """
        if self.residual is not None:
            kernels.take_back(
                self.route.codec,
                self.shape,
                self.flat if numbers is None else numbers,
                self.residual,
                self.payload,
                feedback=self.route.feedback,
                step=self.step,
                when=when,
            )

    def decode(self, kernels: Executors, payloads: torch.Tensor, scale: float) -> None:
        """Writes ``scale`` times the sum of the payloads, shape=(k, bytes), over the numbers.

        Raises:
            PayloadError: naming the rank.
        """
        kernels.decode_sum(
            self.route.codec, self.shape, payloads, self.flat, step=self.step, scale=scale
        )


@dataclass(eq=False)
class Coded(Piece):
    """A whole gradient that has been encoded, until it is decoded.

    Attributes:
        slot: whose gradient.
        gradient: the gradient itself; the result is written over it.
        seconds: that encoding took.
    """

    slot: Slot
    gradient: torch.Tensor
    seconds: float = 0.0

    def count(self, counters: Counters) -> None:
        """Adds the encoding to the counters."""
        counters.encoded_elements += self.flat.numel()
        counters.encode_seconds += self.seconds

    def decode(self, kernels: Executors, payloads: torch.Tensor, scale: float) -> None:
        """As :meth:`Piece.decode`; the error names the parameter, too."""
        try:
            super().decode(kernels, payloads, scale)
        except PayloadError as error:
            raise PayloadError(f"{self.slot.name}: {error}") from None
