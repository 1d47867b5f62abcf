"""Runs labs, and finds what they would leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.jobs import ROOT as ROOT

_BUSY = "this machine is too busy"


def why_not() -> str:
    """The reason why no lab can be made on this machine; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2)"
    bucket = "tc qdisc add dev lo root tbf rate 1mbit burst 10kb latency 50ms"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", *bucket.split()],
        capture_output=True,
        text=True,
    )
    return f"this kernel or container refuses: {tried.stderr.strip()}" if tried.returncode else ""


def command(*arguments: str) -> list[str]:
    """The command that runs a lab."""
    return [sys.executable, "-m", "benchmarks.lab", *arguments]


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a lab to its end, and returns its status and output.

    A lab refuses to start while other work delays its packets; then there are two more tries.
    """
    for _ in range(3):
        done = subprocess.run(
            command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        if _BUSY not in done.stderr:
            break
    return done


def traces() -> dict[str, str]:
    """The state of this machine that a lab could change."""
    printed = {
        " ".join(words): subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for words in (
            ["ip", "netns", "list"],
            ["ip", "-brief", "address"],
            ["tc", "qdisc", "show"],
            ["ip", "route"],
        )
    }
    files = ("/proc/self/mountinfo", "/etc/hosts", "/proc/sys/kernel/hostname")
    return {
        **printed,
        **{name: Path(name).read_text() for name in files},
        "/etc/netns": str(Path("/etc/netns").exists()),
    }


def processes_in(networks: set[str]) -> list[int]:
    """The processes in some network namespaces, which are named as the links ``/proc/PID/ns/net``."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(link) in networks:
                found.append(int(link.parts[2]))
        except OSError:
            continue  # The process has ended.
    return found
