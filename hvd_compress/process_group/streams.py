"""The streams of a CUDA device: the stream of the backward pass, and a side stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from hvd_compress.engine.executors import current_stream


class Beside(Protocol):
    """A side stream, beside the stream that is current in hooks."""

    def entered(self) -> AbstractContextManager[None]:
        """Makes the side stream current, after all work that the current stream has so far."""
        ...

    def caught_up(self) -> None:
        """Makes the current stream wait for all work that the side stream has so far."""
        ...

    def takes(self, tensor: torch.Tensor) -> None:
        """Delays the reuse of a tensor's memory until the side stream's work so far is done."""
        ...


class SideStream(Beside):
    """Implements :class:`Beside` with a stream of a CUDA device.

    Messages of other ranks are decoded in this stream, so that the backward pass does not wait for them.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        stream, current = self._made(), current_stream(self._device)
        if current != stream:
            stream.wait_stream(current)
        with torch.get_device_module(self._device).stream(stream):
            yield

    def caught_up(self) -> None:
        current_stream(self._device).wait_stream(self._made())

    def takes(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._made())

    def _made(self) -> torch.Stream:
        # Not before it is needed: a compressor may be made before CUDA is used.
        if self._stream is None:
            self._stream = torch.get_device_module(self._device).Stream(self._device)
        return self._stream


class NoStream(Beside):
    """Implements :class:`Beside` without a stream, for collectives that the host itself waits for."""

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def caught_up(self) -> None:
        return

    def takes(self, tensor: torch.Tensor) -> None:
        return
