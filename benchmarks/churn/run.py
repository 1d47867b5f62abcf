"""One job with one compression, and what became of it."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.churn import checks
from benchmarks.churn.elastic_job import ElasticJob
from benchmarks.churn.events import EVENTS, Scene, shuffled
from benchmarks.churn.reports import Report, dead, read

PATIENCE = 300
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
        unsent: the largest norms of what was unsent, in the first and in the second half.
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
    unsent: tuple[float, float] = (0.0, 0.0)
    slowdown: float = 1.0
    losses: tuple[float, float] = (0.0, 0.0)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Disturbed:
    """A job to which one thing after another happens.

    Attributes:
        seconds: after which no event begins, but for the first of each kind.
        chance: decides about events.
        say: takes a line on each event.
        hosts: at the start.
        slots: ranks on each host.
        every: steps between two commits.
    """

    seconds: float
    chance: random.Random
    say: Callable[[str], None]
    hosts: int = HOSTS
    slots: int = 1
    every: int = 10

    def __call__(self, job: ElasticJob, reports: Path, outcome: Outcome) -> None:
        """Has events happen, each kind once before any comes again, and at least once."""
        deck: list[str] = []
        until = time.time() + self.seconds
        while time.time() < until or len(outcome.events) < len(EVENTS):
            time.sleep(self.chance.uniform(*CALM))
            deck = deck or shuffled(self.chance, len(job.hosts))
            kind = deck.pop(0)
            latest = _latest(read(reports))
            began = time.time()
            EVENTS[kind].happen(Scene(job, latest, self.chance))
            calm = time.time()
            outcome.collateral += _wait(job, reports, calm, self.slots)
            took = time.time() - calm
            outcome.events[kind] = outcome.events.get(kind, 0) + 1
            outcome.recovery[kind] = max(outcome.recovery.get(kind, 0.0), took)
            self.say(
                f"{kind}: {len(latest)} ranks, then {self.slots * len(job.hosts)}; "
                f"{calm - began:.1f} + {took:.1f} s"
            )

    @staticmethod
    def checks(reports: list[Report]) -> list[str]:
        """What holds only in such a job."""
        return checks.memory(reports, checks.GROWTH)


@dataclass(frozen=True)
class Undisturbed:
    """A job of many steps.

    Attributes:
        steps: that it makes at least.
        say: takes a line now and then.
        hosts: how many.
        slots: ranks on each host.
    """

    steps: int
    say: Callable[[str], None]
    hosts: int = 2
    slots: int = 1

    @property
    def every(self) -> int:
        """Steps between two commits."""
        return max(1, self.steps // 200)

    def __call__(self, job: ElasticJob, reports: Path, outcome: Outcome) -> None:
        """Waits until the steps are made."""
        said = made = 0
        while made < self.steps:
            since = time.time()
            _wait(job, reports, since, self.slots)
            made = _latest(read(reports))[0].step
            if made >= said + self.steps // 10:
                said = made
                self.say(f"step {made} of {self.steps}")
            time.sleep(1.0)

    @staticmethod
    def checks(reports: list[Report]) -> list[str]:
        """What holds only in such a job."""
        return [*checks.memory(reports, checks.STEADY_GROWTH), *checks.residuals(reports)]


def run(compression: str, what: Disturbed | Undisturbed, most_sent: float) -> Outcome:
    """Trains, and checks what ranks reported.

    Args:
        compression: as on the benchmarks' command lines.
        what: happens to the job.
        most_sent: the largest part of the uncompressed bytes that messages may have.
    """
    outcome = Outcome(compression)
    with tempfile.TemporaryDirectory() as name:
        folder, reports, enough = Path(name), Path(name, "reports"), Path(name, "enough")
        reports.mkdir()
        command = [sys.executable, "-m", "benchmarks.churn.worker", "--compression", compression]
        command += ["--every", str(what.every)]
        command += ["--folder", str(reports), "--enough", str(enough)]
        began = time.time()
        with ElasticJob(folder, command, hosts=what.hosts, slots=what.slots) as job:
            try:
                _wait(job, reports, began, what.slots)
                what(job, reports, outcome)
                enough.touch()
                _end(job)
            except Failed as error:
                outcome.problems.append(f"{error}; it printed:\n{job.printed[-5000:]}")
        outcome.seconds = time.time() - began
        made = read(reports)
        _judge(outcome, made, most_sent)
        outcome.problems += what.checks(made) if made else []
    return outcome


def _latest(reports: list[Report]) -> list[Report]:
    """The last report of each rank of the present run."""
    by_rank = {report.rank: report for report in reports if report.run == reports[-1].run}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _wait(job: ElasticJob, reports: Path, since: float, slots: int) -> int:
    """Until all ranks of all hosts have made a commit since then. Returns how many hosts were replaced."""
    limit, replaced = time.time() + PATIENCE, 0
    while True:
        latest = [report for report in _latest(read(reports)) if report.seconds > since]
        if Counter(report.host for report in latest) == dict.fromkeys(job.hosts, slots):
            return replaced
        if gone := dead(reports, job.hosts):
            job.change(add=len(gone), remove=gone)
            replaced += len(gone)
        if job.process.poll() is not None:
            raise Failed(f"the job ended with {job.process.returncode} before it was told to")
        if time.time() > limit:
            raise Failed(f"no commit of {slots * len(job.hosts)} ranks within {PATIENCE} s")
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
    outcome.unsent = checks.unsent(reports)
    outcome.slowdown = checks.slowdown(reports)
    outcome.losses = checks.mean_loss(reports[:20]), checks.mean_loss(reports[-20:])
    outcome.problems += [
        *checks.replicas(reports),
        *checks.conservation(reports),
        *checks.compression(reports, most_sent),
        *checks.learning(reports),
    ]
