"""The end of a backward pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from hvd_compress.engine.autograd import after_backward


class BackwardPass:
    """Calls ``end`` at the end of the backward pass in progress; knows whether a pass was interrupted."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._queued: weakref.ref[functools.partial[None]] | None = None

    @property
    def broken(self) -> bool:
        """Whether the last pass was interrupted: ``end`` was not called, and will not be."""
        # Autograd forgets its callbacks with the pass that they were queued in.
        return self._queued is not None and self._queued() is None

    def watch(self) -> bool:
        """Queues ``end``, unless the pass in progress has it already.

        A backward pass within another one, as in activation checkpointing, belongs to the outer one.

        Returns:
            Whether the pass before this one was interrupted.
        """
        broken = self.broken
        if broken or self._queued is None:
            call = functools.partial(self._call)
            # Behind FSDP2's own callback, in which gradients of the first layers may be reduced.
            after_backward(call)
            self._queued = weakref.ref(call)
        return broken

    def _call(self) -> None:
        self._queued = None
        self._end()
