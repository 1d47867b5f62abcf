"""Short measurements of the links and the codecs, with a framework's tensors and collectives."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hvd_compress.exchange.counters import Counters
from hvd_compress.planner.measured import Coding

Work = Callable[[], None]

MEETING = "meeting before probe"
"""The collective in which ranks meet; it is not timed."""

SMALL = "probe"
"""The collective of a few bytes."""

SMALL_BYTES = 16
"""What ranks meet with, and what the small message has."""

_BYTES = 2**19
"""What each rank sends in a probe: far more than the burst that a rate limit lets pass."""

_ELEMENTS = 2**20
"""Of the tensor that codecs are measured with: more than a cache close to the processor holds."""

_COLUMNS = 256
"""Of the matrix that stands for gradients where a codec looks at rows or columns."""

_REPEATS = 2


class Prober(ABC):
    """Measures on this rank; the ranks' numbers still have to be brought together.

    Args:
        size: ranks, more than one.
        largest: elements of the largest gradient: probes are no larger than what will be sent.
        counters: count what the probes send.

    Attributes:
        part: bytes, a multiple of 16; a rank gathers two parts, adds up one for each rank, and in an
            alltoall sends two to each.
        elements: of the tensor that codecs are measured with.
        sent: bytes that each rank sends in each large collective of :meth:`links`.
    """

    def __init__(self, size: int, largest: int, counters: Callable[[], Counters]) -> None:
        self._size = size
        self._counters = counters
        self.elements = min(_ELEMENTS, _COLUMNS * max(1, largest // _COLUMNS))
        # Parts of a multiple of 16 bytes, so that each collective sends exactly as much as the others.
        self.part = 16 * -(-min(_BYTES, 4 * largest) // (32 * (size - 1)))
        self.sent = 2 * self.part * (size - 1)

    def message_bytes(self, kind: str) -> int:
        """What a rank hands to the collective of a kind."""
        if kind == "allgather":
            return 2 * self.part
        return self._size * self.part * (2 if kind == "alltoall" else 1)

    def links(self, kinds: Sequence[str]) -> list[float]:
        """Seconds of a small allreduce, and of a large collective of each kind, in that order.

        Waits for all ranks. They meet in a sum, which is not timed, so that nobody's delay counts.

        Args:
            kinds: some of :data:`~hvd_compress.planner.measured.KINDS`, the same on every rank.
        """
        self._run(MEETING)
        counters = self._counters()
        counters.add_allreduce(self._size, 2 * SMALL_BYTES)
        times = [self._timed(SMALL)]
        for kind in kinds:
            times.append(self._timed(kind))
            counters.message_bytes += self.message_bytes(kind)
            counters.wire_bytes += self.sent
        return times

    def speeds(self, codings: Sequence[Coding]) -> list[tuple[float, float]]:
        """Seconds an element to encode and to decode, for each codec."""
        return [self._speed(coding) for coding in codings]

    @abstractmethod
    def _run(self, what: str) -> None:
        """A collective from its start to its end: :data:`MEETING`, :data:`SMALL`, or of a kind."""

    @abstractmethod
    def _work(self, coding: Coding, shape: tuple[int, ...]) -> tuple[Work, Work]:
        """What encodes random numbers of that shape, and what decodes them."""

    def _settle(self) -> None:
        """Waits for what a device does behind the host's back."""
        return

    def _speed(self, coding: Coding) -> tuple[float, float]:
        shape: tuple[int, ...] = (self.elements,)
        if coding[0].shaped and self.elements % _COLUMNS == 0:
            shape = (self.elements // _COLUMNS, _COLUMNS)
        encode, decode = self._work(coding, shape)
        return self._fastest(encode) / self.elements, self._fastest(decode) / self.elements

    def _timed(self, what: str) -> float:
        started = time.perf_counter()
        self._run(what)
        self._settle()
        return time.perf_counter() - started

    def _fastest(self, work: Work) -> float:
        seconds = []
        for _ in range(_REPEATS):
            self._settle()
            started = time.perf_counter()
            work()
            self._settle()
            seconds.append(time.perf_counter() - started)
        return min(seconds)
