"""What a rank of a churn run writes at each commit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """A rank at a commit.

    Attributes:
        run: a number that the ranks draw together each time training goes on.
        step: steps made until here, those before a reset included.
        rank, size: in Horovod.
        host: the rank's host, as the discovery script calls it.
        process: its number in the system.
        seconds: since the epoch.
        weights: a digest of the parameters' bytes.
        loss: of the last batch.
        sent: bytes of messages over uncompressed bytes, since the last report of this process.
        missing: norm of what was neither applied nor is unsent, over all steps; None where the codec has no
            error feedback that keeps it.
        unsent: norm of the average of what ranks have not sent.
        gradients: norm of the sum of all averaged gradients.
        memory: resident bytes.
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
        """Writes it as a line of this process's file."""
        with (folder / f"{self.process}.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def read(folder: Path) -> list[Report]:
    """All reports so far, by time; a line that is being written is left out."""
    reports = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                reports.append(Report(**json.loads(line)))
    return sorted(reports, key=lambda report: report.seconds)


def announce(folder: Path, host: str) -> None:
    """Writes down that this process is one of a host's."""
    (folder / f"{host}-{os.getpid()}.process").touch()


def dead(folder: Path, hosts: Iterable[str]) -> list[str]:
    """Those of the hosts of which a process has ended."""
    return [host for host in hosts if any(map(_has_ended, folder.glob(f"{host}-*.process")))]


def _has_ended(path: Path) -> bool:
    return not Path("/proc", path.stem.rpartition("-")[2]).exists()
