"""What a lab must leave as it was, and whether one can be made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def why_not() -> str:
    """Why no lab can be made on this machine; empty where one can."""
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
    """A command line of the lab."""
    return [sys.executable, "-m", "benchmarks.lab", *arguments]


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a lab to its end."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def traces() -> dict[str, str]:
    """Everything by which a lab could be noticed outside of it."""
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
    """The processes in any of these network namespaces, named as ``/proc/PID/ns/net`` is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(link) in networks:
                found.append(int(link.parts[2]))
        except OSError:
            continue  # It ended meanwhile.
    return found
