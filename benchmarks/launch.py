"""Starts benchmarks on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent


class RankError(RuntimeError):
    """A rank failed."""


def horovodrun(ranks: int, module: str, arguments: list[str]) -> None:
    """Runs ``python -m module`` on ``ranks`` ranks that share this machine, and waits for them.

    Raises:
        RankError: a rank ended with a status other than 0.
    """
    launcher = ["benchmarks.horovodrun", "--gloo", "-np", str(ranks)]
    _run(launcher, module, arguments, f"{ranks} ranks")


def lab(hosts: int, slots: int, module: str, arguments: list[str], *options: str) -> None:
    """Runs ``python -m module`` on the hosts of a lab, and waits for the ranks.

    Args:
        hosts: the number of hosts.
        slots: the number of ranks on each host.
        module: the module.
        arguments: the module's arguments.
        options: further options of the lab; without any, links are not limited.

    Raises:
        RankError: a rank ended with a status other than 0, or no lab can be made on this machine.
    """
    size = ["--hosts", str(hosts), "--slots", str(slots)]
    launcher = ["benchmarks.lab", *size, *options, "--patient", "--"]
    # Hierarchical exchanges need process sets within and between hosts.
    dynamic = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    _run(launcher, module, arguments, f"{hosts} hosts of {slots} ranks", dynamic)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-m", module, *arguments]


def _run(
    launcher: list[str],
    module: str,
    arguments: list[str],
    where: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",  # Without TensorFlow's notes on its build.
        **variables,
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    worker = python(module, *arguments)
    status = subprocess.run(python(*launcher, *worker), cwd=ROOT, env=environment)
    if status.returncode:
        raise RankError(f"expected {module} to succeed on {where}, got status {status.returncode}")
