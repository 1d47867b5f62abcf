"""What ranks measure at the end of a step, and how they bring it together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from hvd_compress.perfmodel.machines import CodecSpeed
from hvd_compress.planner.measured import KINDS, Coding, Probe
from hvd_compress.planner.planner import Need, Report
from hvd_compress.planner.probing import Prober

Add = Callable[[Sequence[float], str], Sequence[float]]
"""The sum of all ranks' numbers, in float64, by a collective whose name ends with the text."""


class Reporter:
    """One rank's measurements, until all ranks share them.

    Args:
        rank: this one.
        size: how many there are.
        codings: what has a speed.
        add: a collective.
        prober: makes what measures, when it is needed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        codings: Sequence[Coding],
        add: Add,
        prober: Callable[[], Prober],
    ) -> None:
        self._rank, self._size = rank, size
        self._codings = codings
        self._add = add
        self._make_prober = prober
        self._prober: Prober | None = None
        self._seconds: list[float] = []
        self._windows: list[float] = []

    def step(self, seconds: float, window: float) -> None:
        """Notes a step, and for how long messages could travel in it while the rank computed."""
        self._seconds.append(seconds)
        self._windows.append(max(0.0, window))

    def forget(self) -> None:
        """Begins anew."""
        self._seconds.clear()
        self._windows.clear()

    def report(self, need: Need) -> Report | None:
        """What all ranks have measured since the last report; measures what is needed beside steps.

        To be called by all ranks at the end of the same step.

        Returns:
            The same on every rank; None where some have joined, with whom nothing can be agreed.
        """
        seconds, windows = self._seconds or [0.0], self._windows or [0.0]
        shared = self._share([statistics.median(seconds), statistics.median(windows)], "step")
        if shared is None:
            return None
        self.forget()
        slowest, window = max(row[0] for row in shared), min(row[1] for row in shared)
        if need is Need.SECONDS:
            return Report(slowest, window)
        kinds = KINDS if need is Need.ALL else KINDS[:1]
        codings = self._codings if need is Need.ALL else []
        prober = self._prober = self._prober or self._make_prober()
        started = time.perf_counter()
        numbers = prober.links(kinds)
        for encode, decode in prober.speeds(codings):
            numbers += [encode, decode]
        numbers.append(time.perf_counter() - started)
        measured = self._share(numbers, f"probe of {len(numbers)}")
        if measured is None:
            return None
        small, *rest, overhead = (max(column) for column in zip(*measured, strict=True))
        links, coding = rest[: len(kinds)], rest[len(kinds) :]
        probe = Probe(prober.sent, small, dict(zip(kinds, links, strict=True)))
        speeds = map(CodecSpeed, coding[::2], coding[1::2])
        return Report(slowest, window, probe, dict(zip(codings, speeds, strict=True)), overhead)

    def _share(self, numbers: Sequence[float], what: str) -> list[Sequence[float]] | None:
        """All ranks' numbers, a row each; None if a rank has joined.

        A sum, and no gather, because a rank that has joined adds zeros to sums.
        """
        width = len(numbers) + 1
        table = [0.0] * (width * self._size)
        table[width * self._rank : width * (self._rank + 1)] = [*numbers, 1.0]
        table = list(self._add(table, f"planner {what}"))
        rows = [table[width * rank : width * (rank + 1)] for rank in range(self._size)]
        return [row[:-1] for row in rows] if all(row[-1] == 1 for row in rows) else None
