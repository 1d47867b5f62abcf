"""Describes the machine and the software of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import hvd_compress

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")


def versions() -> dict[str, str]:
    """The versions of Python, of this package and of the frameworks that are installed."""
    # A package that runs from its source folder has no metadata.
    own = {"python": platform.python_version(), "hvd_compress": hvd_compress.__version__}
    return own | versions_of(*_PACKAGES)


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def description() -> dict[str, str | int]:
    """The processor, the number of cores that this process may use, the system, and the code's commit."""
    return {
        "commit": commit(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def commit() -> str:
    """The checkout's commit, with ``-dirty`` if files differ from it; ``unknown`` without Git."""
    # Git refuses by default if the checkout belongs to another user, as it may for the lab's ranks.
    git = ("git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent))
    try:
        found = subprocess.run(
            (*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def network() -> dict[str, str | bool | None]:
    """The hosts and links of the lab in which this process is a rank; values are None outside a lab."""
    names = {"hosts": "LAB_HOSTS", "link": "LAB_RATE", "rtt": "LAB_RTT", "loss": "LAB_LOSS"}
    found = {what: os.environ.get(name) for what, name in names.items()}
    return {**found, "patient": "LAB_PATIENT" in os.environ}


def _cpu_name() -> str:
    """The processor's name with its family and model, which tell the generation if the name does not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    found = {key.strip(): value.strip() for key, value in reversed(pairs)}
    name = found.get("model name") or platform.processor() or "unknown"
    if "cpu family" not in found:
        return name
    return f"{name} (family {found['cpu family']}, model {found['model']})"
