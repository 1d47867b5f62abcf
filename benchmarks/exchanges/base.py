"""What an exchange is to the benchmark: its steps, its traffic and its right answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from hvd_compress.exchanges.steps import FLOAT_BYTES
from hvd_compress.torch.collectives import Collectives

Answer = tuple[np.ndarray, np.ndarray | float]
"""A sum, shape=(n,), dtype float64 or float32, and how far from it a result may be."""


class Clock:
    """Seconds of one exchange, part by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Ends a part, and begins the next one."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Counts what was done since the last part to none."""
        self._last = time.perf_counter()


Work = Callable[[torch.Tensor, Clock], torch.Tensor]
"""Sums a gradient, shape=(n,), float32, over the ranks, and tells the clock when each part is done."""


class Exchange(ABC):
    """One way to sum float32 gradients over all ranks.

    Attributes:
        parts: what the time is divided into, in order.
        config: what makes it differ from others of its class, for the JSON.
    """

    parts: ClassVar[tuple[str, ...]]
    config: dict[str, Any]

    @abstractmethod
    def prepare(self, collectives: Collectives, threads: int, elements: int) -> Work:
        """Allocates what exchanges of tensors of that size need; residuals are zero."""

    @abstractmethod
    def wire_bytes(self, elements: int, ranks: int) -> float:
        """Bytes that a rank sends, and receives, on average over the ranks."""

    @abstractmethod
    def answer(self, gradients: list[np.ndarray]) -> Answer:
        """What the first exchange of these gradients, one a rank, must come to."""

    def algorithm_bandwidth(self, elements: int, seconds: float) -> float:
        """Bytes of float32 gradient that are summed in a second, whatever travels for them."""
        return FLOAT_BYTES * elements / seconds

    def bus_bandwidth(self, elements: int, ranks: int, seconds: float) -> float:
        """Bytes that each rank sends in a second: what to compare with the rate of its link."""
        return self.wire_bytes(elements, ranks) / seconds
