"""Runs a job with one compression, and checks its reports."""

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
"""The time limit in seconds for all ranks to make a commit after an event."""

HOSTS = 3
"""The default number of hosts at the start."""

CALM = (1.0, 4.0)
"""The shortest and the longest time between a recovery and the next event, in seconds."""


class Failed(Exception):
    """The job ended early, or did not continue."""


@dataclass
class Outcome:
    """The events and the results of a job.

    Attributes:
        compression: the compression, as on the command line.
        seconds: the duration of the job.
        steps: the number of steps, without those that were undone.
        commits: the number of reports at commits.
        events: the number of events of each kind.
        collateral: the number of hosts whose rank died without being killed: if a rank is lost, Gloo can
            abort another one (``gloo::EnforceNotMet``).
        recovery: for each kind, the longest seconds from the event to the first commit of all ranks.
        missing: the largest missing part of the unsent gradients; None without full error feedback.
        sent: the largest ratio of sent to uncompressed bytes in an interval.
        growth: the largest growth of a process, in bytes.
        unsent: the largest norms of unsent gradients, in the first and in the second half.
        slowdown: the slowdown of steps, see :func:`benchmarks.churn.checks.slowdown`.
        losses: the mean losses at the start and at the end.
        problems: a message for each failed check.
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
    """A job with one event after another.

    Attributes:
        seconds: the time after which no event begins, unless a kind has not happened yet.
        chance: the source of random numbers that decide on events.
        say: a function that takes a line on each event.
        hosts: the number of hosts at the start.
        slots: the number of ranks on each host.
        every: the number of steps between commits.
    """

    seconds: float
    chance: random.Random
    say: Callable[[str], None]
    hosts: int = HOSTS
    slots: int = 1
    every: int = 10

    def __call__(self, job: ElasticJob, reports: Path, outcome: Outcome) -> None:
        """Causes events: each kind once before any is repeated, and at least once."""
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
        """Checks that memory stays bounded while ranks come and go."""
        return checks.memory(reports, checks.GROWTH)


@dataclass(frozen=True)
class Undisturbed:
    """A job of many steps without events.

    Attributes:
        steps: the smallest number of steps.
        say: a function that takes a line on the progress now and then.
        hosts: the number of hosts.
        slots: the number of ranks on each host.
    """

    steps: int
    say: Callable[[str], None]
    hosts: int = 2
    slots: int = 1

    @property
    def every(self) -> int:
        """The number of steps between commits."""
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
        """Checks that memory and residuals do not grow."""
        return [*checks.memory(reports, checks.STEADY_GROWTH), *checks.residuals(reports)]


def run(compression: str, what: Disturbed | Undisturbed, most_sent: float) -> Outcome:
    """Trains, and checks the ranks' reports.

    Args:
        compression: the compression, as on the benchmarks' command lines.
        what: the kind of job.
        most_sent: the largest permitted ratio of sent to uncompressed bytes in an interval.
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
    """The last report of each rank in the present run, ordered by rank."""
    by_rank = {report.rank: report for report in reports if report.run == reports[-1].run}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _wait(job: ElasticJob, reports: Path, since: float, slots: int) -> int:
    """Waits until all ranks have made a commit after ``since``; returns the number of hosts replaced.

    Raises:
        Failed: the job ended, or a commit is missing after the time limit.
    """
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
