"""One job with one compression, and what became of it."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.churn import checks
from benchmarks.churn.elastic_job import ElasticJob
from benchmarks.churn.events import EVENTS, Scene, shuffled
from benchmarks.churn.reports import Report, dead, read

PATIENCE = 120
"""Seconds after an event within which all ranks must have made a commit."""

HOSTS = 3
"""At the start."""

CALM = (1.0, 4.0)
"""The shortest and the longest seconds between a recovery and the next event."""


class Failed(Exception):
    """The job ended, or did not go on."""


@dataclass
class Outcome:
    """A job's events and checks.

    Attributes:
        compression: as on the command line.
        seconds: how long it ran.
        steps: of optimizers, those that were undone not counted.
        commits: reports of ranks at commits.
        events: how many of each kind.
        collateral: hosts whose rank died though nobody killed it: where a rank is lost, Gloo can abort
            another one (``gloo::EnforceNotMet``).
        recovery: for each kind, the longest seconds from the event to the first commit of all ranks.
        missing: the largest part of what was unsent that was missing; None without error feedback.
        sent: the largest part of the uncompressed bytes that an interval's messages had.
        growth: bytes by which a process grew most.
        slowdown: of steps, see :func:`benchmarks.churn.checks.slowdown`.
        losses: at the start and at the end.
        problems: what does not hold.
    """

    compression: str
    seconds: float = 0.0
    steps: int = 0
    commits: int = 0
    events: dict[str, int] = field(default_factory=dict)
    collateral: int = 0
    recovery: dict[str, float] = field(default_factory=dict)
    missing: float | None = None
    sent: float = 0.0
    growth: float = 0.0
    slowdown: float = 1.0
    losses: tuple[float, float] = (0.0, 0.0)
    problems: list[str] = field(default_factory=list)


def run(
    compression: str,
    seconds: float,
    chance: random.Random,
    most_sent: float,
    say: Callable[[str], None],
) -> Outcome:
    """Trains for so many seconds, with one event after another, and checks what ranks reported.

    Args:
        compression: as on the benchmarks' command lines.
        seconds: after which no event begins, but for the first of each kind.
        chance: decides about events.
        most_sent: the largest part of the uncompressed bytes that messages may have.
        say: takes a line on each event.
    """
    outcome = Outcome(compression)
    with tempfile.TemporaryDirectory() as name:
        folder, reports, enough = Path(name), Path(name, "reports"), Path(name, "enough")
        reports.mkdir()
        command = [sys.executable, "-m", "benchmarks.churn.worker", "--compression", compression]
        command += ["--folder", str(reports), "--enough", str(enough)]
        began = time.time()
        with ElasticJob(folder, command, hosts=HOSTS) as job:
            try:
                _wait(job, reports, began)
                _disturb(job, reports, began + seconds, chance, outcome, say)
                enough.touch()
                _end(job)
            except Failed as error:
                outcome.problems.append(f"{error}; it printed:\n{job.printed[-5000:]}")
        outcome.seconds = time.time() - began
        _judge(outcome, read(reports), most_sent)
    return outcome


def _disturb(
    job: ElasticJob,
    reports: Path,
    until: float,
    chance: random.Random,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    """Has events happen, each kind once before any comes again, and at least once."""
    deck: list[str] = []
    while time.time() < until or len(outcome.events) < len(EVENTS):
        time.sleep(chance.uniform(*CALM))
        deck = deck or shuffled(chance, len(job.hosts))
        kind = deck.pop(0)
        latest = _latest(read(reports))
        began = time.time()
        EVENTS[kind].happen(Scene(job, latest, chance))
        calm = time.time()
        outcome.collateral += _wait(job, reports, calm)
        took = time.time() - calm
        outcome.events[kind] = outcome.events.get(kind, 0) + 1
        outcome.recovery[kind] = max(outcome.recovery.get(kind, 0.0), took)
        say(
            f"{kind}: {len(latest)} ranks, then {len(job.hosts)}; {calm - began:.1f} + {took:.1f} s"
        )


def _latest(reports: list[Report]) -> list[Report]:
    """The last report of each rank of the present run."""
    by_rank = {report.rank: report for report in reports if report.run == reports[-1].run}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _wait(job: ElasticJob, reports: Path, since: float) -> int:
    """Until a rank on each of the hosts has made a commit since then. Returns how many were replaced."""
    limit, replaced = time.time() + PATIENCE, 0
    while True:
        latest = [report for report in _latest(read(reports)) if report.seconds > since]
        if {report.host for report in latest} == set(job.hosts):
            return replaced
        if gone := dead(reports, job.hosts):
            job.change(add=len(gone), remove=gone)
            replaced += len(gone)
        if job.process.poll() is not None:
            raise Failed(f"the job ended with {job.process.returncode} before it was told to")
        if time.time() > limit:
            raise Failed(f"no commit of {len(job.hosts)} ranks within {PATIENCE} s")
        time.sleep(0.1)


def _end(job: ElasticJob) -> None:
    limit = time.time() + PATIENCE
    while job.process.poll() is None:
        if time.time() > limit:
            raise Failed(f"the job did not end within {PATIENCE} s")
        time.sleep(0.1)
    if job.process.returncode != 0:
        raise Failed(f"the job ended with {job.process.returncode}")


def _judge(outcome: Outcome, reports: list[Report], most_sent: float) -> None:
    if not reports:
        outcome.problems.append("no rank made a commit")
        return
    outcome.steps, outcome.commits = max(report.step for report in reports), len(reports)
    parts = [r.missing / r.unsent for r in reports if r.missing is not None and r.unsent]
    outcome.missing = max(parts) if parts else None
    outcome.sent = max(report.sent for report in reports)
    outcome.growth = checks.growth(reports)
    outcome.slowdown = checks.slowdown(reports)
    outcome.losses = checks.mean_loss(reports[:20]), checks.mean_loss(reports[-20:])
    outcome.problems += [
        *checks.replicas(reports),
        *checks.conservation(reports),
        *checks.compression(reports, most_sent),
        *checks.learning(reports),
        *checks.memory(reports),
    ]
