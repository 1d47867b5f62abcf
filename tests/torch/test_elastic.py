"""Ranks that are killed, replaced and added under elastic Horovod, by the documentation's own script."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.jobs import ROOT

TIMEOUT = 240
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1")
"""Names of this machine, each of which Horovod takes for a host of its own."""

STEP = re.compile(
    r"step (\d+): rank (\d+) of (\d+), process (\d+), loss ([\d.]+), bytes ([\d.]+) of uncompressed"
)


class _Job:
    """An elastic job, and the hosts that its discovery script finds."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._hosts, self._printed = folder / "hosts", folder / "printed"
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        script.chmod(0o755)
        self.find(2)
        options = ["-np", "2", "--min-np", "1", "--host-discovery-script", str(script)]
        command = [sys.executable, "docs/examples/elastic_quickstart.py", "--steps", str(steps)]
        with self._printed.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.horovodrun", "--gloo", *options, *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def find(self, count: int, *, without: str = "") -> None:
        """Has so many hosts be found, each with one slot."""
        names = [name for name in HOSTS[:count] if name != without]
        whole = self._hosts.with_suffix(".part")
        whole.write_text("".join(f"{name}:1\n" for name in names))
        whole.replace(self._hosts)

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def steps(self) -> list[tuple[int, int, int, int, float, float]]:
        """Step, rank, ranks, process, loss and share of the bytes, in the order of printing."""
        found = STEP.findall(self.printed)
        return [(*map(int, one[:4]), float(one[4]), float(one[5])) for one in found]

    def until(self, met: Callable[[], bool]) -> None:
        limit = time.monotonic() + TIMEOUT
        while not met():
            assert self.process.poll() is None and time.monotonic() < limit, self.printed
            time.sleep(0.1)


@contextmanager
def _job(folder: Path, steps: int) -> Iterator[_Job]:
    job = _Job(folder, steps)
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(20)
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)


def test_a_rank_is_killed_and_replaced_and_another_host_comes(tmp_path: Path) -> None:
    with _job(tmp_path, steps=2000) as job:
        job.until(lambda: any(step >= 50 for step, *_ in job.steps()))
        victim = next(process for _, rank, _, process, *_ in job.steps() if rank == 1)
        job.find(3)  # The killed one's host is not used again: the third one takes its place.
        os.kill(victim, signal.SIGKILL)
        job.until(lambda: any(rank == 1 and p != victim for _, rank, _, p, *_ in job.steps()))
        job.find(4)
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
