"""The interface of exchanges in the benchmark: their work, their traffic and the expected result."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from hvd_compress.exchanges.steps import FLOAT_BYTES
from hvd_compress.torch.collectives import HorovodCollectives

Answer = tuple[np.ndarray, np.ndarray | float]
"""The expected sum, shape=(n,), dtype float64 or float32, and the largest permitted error."""


class Clock:
    """A clock that measures the parts of one exchange in seconds."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Ends a part and begins the next one."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leaves the time since the last part out of all parts."""
        self._last = time.perf_counter()


Work = Callable[[torch.Tensor, Clock], torch.Tensor]
"""A function that sums a gradient, shape=(n,), float32, over the ranks, and laps the clock by parts."""


class Exchange(ABC):
    """A way to sum float32 gradients over all ranks.

    Attributes:
        parts: the parts of the time, in order.
        config: the settings that distinguish the exchange from others of its class, for the record.
    """

    parts: ClassVar[tuple[str, ...]]
    config: dict[str, Any]

    @abstractmethod
    def prepare(self, collectives: HorovodCollectives, threads: int, elements: int) -> Work:
        """Allocates the memory for tensors of that size, with residuals of zero, and returns the work."""

    @abstractmethod
    def wire_bytes(self, elements: int, ranks: int) -> float:
        """The bytes that a rank sends, and receives, on average over the ranks."""

    @abstractmethod
    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """The expected result of the first exchange of these gradients, one for each rank."""

    def algorithm_bandwidth(self, elements: int, seconds: float) -> float:
        """The bytes of float32 gradient that are summed in a second, whatever is sent for them."""
        return FLOAT_BYTES * elements / seconds

    def bus_bandwidth(self, elements: int, ranks: int, seconds: float) -> float:
        """The bytes that each rank sends in a second, to compare with the rate of its link."""
        return self.wire_bytes(elements, ranks) / seconds
