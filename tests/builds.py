"""Builds of the native code for tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(name: str, targets: str, *options: str) -> Path:
    """Builds targets in a folder that later runs find again: they compile what has changed.

    One process at a time builds in the folder. There is no limit of time: a compiler ends by itself, and a
    limit that is over would leave its children behind, at work beside the tests that follow.

    Args:
        name: the folder, below ``build``.
        targets: CMake's targets, separated by spaces.
        options: definitions for CMake.

    Returns:
        The folder.

    Raises:
        AssertionError: with the end of the output, where CMake or a compiler fails.
    """
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Until the file is closed.
        _run("cmake", "-S", str(ROOT), "-B", str(folder), *options)
        _run("cmake", "--build", str(folder), "--parallel", "2", "--target", *targets.split())
    return folder


def _run(*command: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}"
