"""The streams of a CUDA device: the stream of the backward pass, and a side stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hvd_compress.engine.executors import current_stream


class NoStream:
    """Stands for a side stream where the host itself waits for collectives: there is none.

    Attributes:
        host_waits: whether the host waits for collectives, and not a stream.
    """

    host_waits = True

    def entered(self) -> AbstractContextManager[None]:
        """Makes the side stream current, after all work that the current stream has so far."""
        return nullcontext()

    def caught_up(self) -> None:
        """Makes the current stream wait for all work that the side stream has so far."""

    def takes(self, *tensors: torch.Tensor) -> None:
        """Delays the reuse of tensors' memory until the side stream's work so far is done."""


class SideStream(NoStream):
    """A stream of a CUDA device beside the stream that is current in hooks.

    Messages of other ranks are decoded in this stream, so that the backward pass does not wait for them.
    """

    host_waits = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes the side stream current, behind the work that the current stream has got."""
        stream, current = self._made(), current_stream(self._device)
        if current != stream:
            stream.wait_stream(current)
        with torch.get_device_module(self._device).stream(stream):
            yield

    def caught_up(self) -> None:
        current_stream(self._device).wait_stream(self._made())

    def takes(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.record_stream(self._made())

    def _made(self) -> torch.Stream:
        # Not before it is needed: a compressor may be made before CUDA is used.
        if self._stream is None:
            self._stream = torch.get_device_module(self._device).Stream(self._device)
        return self._stream
