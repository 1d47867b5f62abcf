"""The versions with which the tests have run."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.reading import RECORDS, record
from benchmarks.support import FRONTENDS
from benchmarks.tables import Table

_BESIDE = {"python": "Python", "tensorflow-cpu": "TensorFlow", "keras": "Keras"}


def matrix() -> Table:
    """The tests of each frontend that passed, a column for each version of PyTorch."""
    names = [path.stem for path in RECORDS.glob("support-*.json")]
    found = sorted((record(name) for name in names), key=_torch)
    rows = [
        [label, *(one["versions"].get(package, "none") for one in found)]
        for package, label in _BESIDE.items()
    ]
    rows += [
        [frontend, *(_cell(one["tests"].get(frontend)) for one in found)] for frontend in FRONTENDS
    ]
    header = ("PyTorch " + ".".join(map(str, _torch(one))) for one in found)
    return Table(("", *header), rows)


def _torch(found: dict[str, Any]) -> list[int]:
    """The numbers of its version of PyTorch, without a local version such as ``+cpu``."""
    return [int(part) for part in found["versions"]["torch"].partition("+")[0].split(".")]


def _cell(counts: dict[str, int] | None) -> str:
    """The tests that passed; of how many, if some failed; and how many were skipped."""
    if counts is None:
        return "untested"
    passed, failed, skipped = (counts[outcome] for outcome in ("passed", "failed", "skipped"))
    shown = f"{passed} of {passed + failed}" if failed else str(passed)
    return f"{shown} ({skipped} skipped)" if skipped else shown
