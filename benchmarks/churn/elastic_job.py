"""A job of elastic Horovod on this machine, whose hosts are added and removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks import json_files
from benchmarks.launch import ROOT


class ElasticJob:
    """A command that runs on hosts which a discovery script lists; leaving the context ends the job.

    Each host is a name of this machine: Horovod takes ``127.0.0.1``, ``127.0.00.1`` and so on for
    different hosts.

    Args:
        folder: the folder for the discovery script and the job's output.
        command: the command of each rank.
        hosts: the number of hosts at the start.
        slots: the number of ranks on each host.

    Attributes:
        process: the process of ``horovodrun``.
        hosts: the names of the present hosts.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], hosts: int = 2, slots: int = 1
    ) -> None:
        self._slots = slots
        self._file, self._printed = folder / "hosts", folder / "printed"
        self._names = 0
        self.hosts: list[str] = []
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\ncat {self._file}\n")
        script.chmod(0o755)
        self.change(add=hosts)
        options = ["-np", str(hosts * slots), "--min-np", str(slots)]
        options += ["--host-discovery-script", str(script)]
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def change(self, *, add: int = 0, remove: Sequence[str] = ()) -> None:
        """Adds hosts to the list of the discovery script, and removes others.

        New hosts have new names, because Horovod does not use a host again on which a rank has failed.
        """
        self.hosts = [name for name in self.hosts if name not in remove]
        for _ in range(add):
            self.hosts.append(_name(self._names))
            self._names += 1
        json_files.replace(self._file, "".join(f"{name}:{self._slots}\n" for name in self.hosts))

    @property
    def printed(self) -> str:
        """The output of all ranks so far."""
        return self._printed.read_text(errors="replace")


def _name(number: int) -> str:
    """A name of this machine's loopback address, by a number below 1,600."""
    return f"127.{'0' * (number // 40 + 1)}.{'0' * (number % 40 + 1)}.1"
