"""The streams of a CUDA device: one that the backward pass works in, and one beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Beside(Protocol):
    """A stream beside the one that is current where hooks are called."""

    def entered(self) -> AbstractContextManager[None]:
        """Makes it the current one, behind all that is in the current one by now."""
        ...

    def caught_up(self) -> None:
        """Has the current stream wait for all that is in it by now."""
        ...

    def takes(self, tensor: torch.Tensor) -> None:
        """Says that work in it uses a tensor: its memory must not be reused before that is done."""
        ...


class SideStream(Beside):
    """Implements :class:`Beside` with a stream of a CUDA device.

    What comes back from other ranks is decoded here, so that the backward pass does not wait for it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        stream, current = self._made(), torch.cuda.current_stream(self._device)
        if current != stream:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield

    def caught_up(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._made())

    def takes(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._made())

    def _made(self) -> torch.cuda.Stream:
        # Not before it is needed: a compressor may be made before CUDA is used.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream


class NoStream(Beside):
    """Implements :class:`Beside` where the host itself waits: there is nothing beside it."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def caught_up(self) -> None:
        return

    def takes(self, tensor: torch.Tensor) -> None:
        return
