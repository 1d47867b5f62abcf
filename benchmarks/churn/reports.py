"""The reports that ranks write at each commit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """A rank's report at a commit.

    Attributes:
        run: a random number that the ranks share from one reset to the next.
        step: the number of steps so far, those before a reset included.
        rank: the rank's number in Horovod.
        size: the number of ranks.
        host: the name of the rank's host in the discovery script.
        process: the process id.
        seconds: the time in seconds since the epoch.
        weights: a digest of the parameters' bytes.
        loss: the loss of the last batch.
        sent: the ratio of sent to uncompressed bytes, since the last report of this process.
        missing: the norm of the gradients of all steps that were neither applied nor are unsent; None if
            the codec has no full error feedback.
        unsent: the norm of the average of the ranks' unsent gradients.
        gradients: the norm of the sum of all averaged gradients.
        memory: the resident memory in bytes.
    """

    run: int
    step: int
    rank: int
    size: int
    host: str
    process: int
    seconds: float
    weights: str
    loss: float
    sent: float
    missing: float | None
    unsent: float
    gradients: float
    memory: int

    def append(self, folder: Path) -> None:
        """Appends the report to this process's file, as a line of JSON."""
        with (folder / f"{self.process}.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def read(folder: Path) -> list[Report]:
    """All reports so far, in the order of time, without lines that are still being written."""
    reports = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                reports.append(Report(**json.loads(line)))
    return sorted(reports, key=lambda report: report.seconds)


def announce(folder: Path, host: str) -> None:
    """Records that this process runs on a host."""
    (folder / f"{host}-{os.getpid()}.process").touch()


def dead(folder: Path, hosts: Iterable[str]) -> list[str]:
    """The hosts on which a process has ended."""
    return [host for host in hosts if any(map(_has_ended, folder.glob(f"{host}-*.process")))]


def _has_ended(path: Path) -> bool:
    return not Path("/proc", path.stem.rpartition("-")[2]).exists()
