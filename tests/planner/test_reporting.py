"""What ranks bring together: the slowest of all, and nothing where one is missing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvd_compress.codecs import FP16, ErrorFeedback
from hvd_compress.exchange.counters import Counters
from hvd_compress.planner.measured import KINDS, Coding
from hvd_compress.planner.planner import Need, Report
from hvd_compress.planner.probing import Prober, Work
from hvd_compress.planner.reporting import Reporter

CODING = (FP16(), ErrorFeedback(alpha=0.0))


class _Meeting:
    """A sum among threads."""

    def __init__(self, ranks: int, joined: int = 0) -> None:
        self._present = threading.Barrier(ranks - joined)
        self._left = threading.Barrier(ranks - joined)
        self._lock = threading.Lock()
        self._total: list[float] = []

    def add(self, numbers: Sequence[float], what: str) -> list[float]:
        with self._lock:
            total = self._total or [0.0] * len(numbers)
            self._total = [a + b for a, b in zip(total, numbers, strict=True)]
        self._present.wait(10)
        total = self._total
        if self._left.wait(10) == 0:
            self._total = []
        self._present.wait(10)
        return total


class _Prober(Prober):
    """Links whose collectives take no time, and work that is counted."""

    runs: list[str]

    def _run(self, what: str) -> None:
        self.runs.append(what)

    def _work(self, coding: Coding, shape: tuple[int, ...]) -> tuple[Work, Work]:
        assert coding == CODING and shape == (self.elements,)
        return lambda: self.runs.append("encode"), lambda: self.runs.append("decode")


def _reports(need: Need, ranks: int = 3, joined: int = 0) -> tuple[list[Report | None], list[str]]:
    meeting = _Meeting(ranks, joined)
    runs: list[str] = []
    reports: list[Report | None] = [None] * ranks

    def rank(number: int) -> None:
        def prober() -> Prober:
            one = _Prober(ranks, 10_000, Counters)
            one.runs = runs if number == 0 else []
            return one

        reporter = Reporter(number, ranks, [CODING], meeting.add, prober)
        for seconds in (3.0, 1.0, 2.0):
            reporter.step(number + seconds, 0.1 * (number + 1) - 1.0 * (seconds == 3.0))
        reports[number] = reporter.report(need)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(ranks - joined)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports[: ranks - joined], runs


def test_the_slowest_rank_counts_and_the_shortest_window():
    reports, runs = _reports(Need.SECONDS)
    assert reports == [Report(4.0, 0.1)] * 3 and runs == []


def test_probes_are_as_slow_as_on_the_slowest_rank():
    reports, runs = _reports(Need.ALL)
    assert reports[0] is not None and reports == [reports[0]] * 3
    assert reports[0].probe is not None and set(reports[0].probe.seconds) == set(KINDS)
    assert reports[0].speeds is not None and list(reports[0].speeds) == [CODING]
    assert runs[:3] == ["meeting before probe", "probe", KINDS[0]]
    assert runs.count("encode") == runs.count("decode") == 2
    link, runs = _reports(Need.LINK)
    assert link[0] is not None and link[0].probe is not None
    assert runs == ["meeting before probe", "probe", KINDS[0]]


def test_nothing_is_agreed_on_without_a_rank():
    assert _reports(Need.ALL, joined=1)[0] == [None, None]


def test_messages_have_the_same_bytes_on_the_wire():
    for ranks in (2, 3, 7):
        prober = _Prober(ranks, 10**6, Counters)
        allreduce, gather, alltoall = (
            prober.message_bytes(kind) for kind in ("allreduce", "allgather", "alltoall")
        )
        assert 2 * (ranks - 1) / ranks * allreduce == prober.sent
        assert (ranks - 1) * gather == prober.sent
        assert (ranks - 1) * alltoall == ranks * prober.sent
        assert gather % 16 == allreduce // ranks % 16 == 0
