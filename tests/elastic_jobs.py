"""Jobs of the documentation's elastic scripts, whose ranks are killed, replaced and added."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.churn.elastic_job import ElasticJob
from tests import jobs

TIMEOUT = 120
"""The time in seconds without any output after which a job is taken to hang."""
TRIES = 3
STEP = re.compile(
    r"(?:step|epoch) (\d+): rank (\d+) of (\d+), process (\d+), loss ([\d.]+), bytes ([\d.]+) of"
)


class _SurvivorLostError(Exception):
    """Gloo has also aborted the remaining rank, which docs/elastic.md says can happen."""


class _Job(ElasticJob):
    """A script of the documentation under elastic Horovod.

    Attributes:
        survivor: the only process that has the job's state; None if several processes have it.
    """

    survivor: int | None = None

    def __init__(self, folder: Path, script: str, *arguments: str) -> None:
        launcher = "tensorflow" if "keras" in script else "horovodrun"
        super().__init__(folder, jobs.forked(launcher, f"docs/examples/{script}", *arguments))

    def steps(self) -> list[tuple[int, int, int, int, float, float]]:
        """The step or epoch, rank, ranks, process, loss and share of bytes of each line printed so far."""
        found = STEP.findall(self.printed)
        return [(*map(int, one[:4]), float(one[4]), float(one[5])) for one in found]

    def until(self, met: Callable[[], bool]) -> None:
        printed, limit = "", time.monotonic() + TIMEOUT
        while not met():
            if self.survivor is not None and not Path(f"/proc/{self.survivor}").exists():
                raise _SurvivorLostError(self.printed)
            if self.printed != printed:
                printed, limit = self.printed, time.monotonic() + TIMEOUT
            assert self.process.poll() is None and time.monotonic() < limit, self.printed
            time.sleep(0.1)


def kill_replace_and_add(folder: Path, script: str, *arguments: str, begun: int) -> None:
    """Kills one of two ranks, replaces it by a rank on another host, and adds a third rank.

    The job must continue from the last commit with compressed messages, learn, and end with the same
    weights on all ranks. If Horovod loses both ranks, another job is tried.

    Args:
        folder: the folder for the job's files.
        script: the name of a script in docs/examples.
        arguments: the script's arguments.
        begun: the step or epoch at which the rank is killed.
    """
    for left in reversed(range(TRIES)):
        try:
            return _kill_replace_and_add(folder / str(left), script, *arguments, begun=begun)
        except _SurvivorLostError:
            if not left:
                raise


def _kill_replace_and_add(folder: Path, script: str, *arguments: str, begun: int) -> None:
    folder.mkdir()
    with _Job(folder, script, *arguments) as job:
        job.until(lambda: any(step >= begun for step, *_ in job.steps()))
        job.survivor, victim = (
            next(process for _, rank, _, process, *_ in job.steps() if rank == wanted)
            for wanted in (0, 1)
        )
        job.change(add=1)  # Horovod does not use a killed rank's host again.
        os.kill(victim, signal.SIGKILL)
        job.until(lambda: any(rank == 1 and p != victim for _, rank, _, p, *_ in job.steps()))
        job.survivor = None
        job.change(add=1)
        job.until(lambda: any(ranks == 3 for _, _, ranks, *_ in job.steps()))
        job.until(lambda: job.process.poll() is not None or "ends with" in job.printed)
        assert job.process.wait(TIMEOUT) == 0, job.printed
        steps, printed = job.steps(), job.printed
    assert max(share for *_, share in steps) < 0.1, printed
    assert {ranks for _, _, ranks, *_ in steps} >= {2, 3}, printed
    assert re.search(r"ranks \[1\] of 2 are gone; .* of norm [\d.e-]+, is shared out", printed), (
        printed
    )
    ended = re.findall(r"rank \d of 3 ends with weights (\S+)", printed)
    assert len(ended) == 3 and len(set(ended)) == 1, printed
    losses = [loss for *_, loss, _ in steps]
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6]), printed
