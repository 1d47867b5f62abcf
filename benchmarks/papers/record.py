"""The JSON record of an experiment, which can be resumed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import json_files
from benchmarks.papers.experiment import Claim, Row

SCHEMA = "hvd_compress/papers/1"


@dataclass
class Record:
    """All cases of an experiment that were made so far.

    Attributes:
        experiment: the experiment's name.
        full: whether it has the paper's size.
        versions: the versions of Python and the packages.
        machine: a description of the machine.
        rows: one row for each case.
        claims: the paper's statements beside the results, once all cases were made.
    """

    experiment: str
    full: bool
    versions: dict[str, str]
    machine: dict[str, str | int]
    rows: list[Row] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def has(self, settings: Any) -> bool:
        """Whether a case was made with exactly these settings."""
        wanted = as_json(dataclasses.asdict(settings))
        return any({**one, "result": None} == {**wanted, "result": None} for one in self.rows)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        head = json.dumps({"schema": SCHEMA, **dataclasses.asdict(self), "rows": []}, indent=1)
        # A line a row: a curve would take one line a point.
        rows = ",\n".join(f"  {json.dumps(one)}" for one in self.rows)
        text = head.replace('"rows": []', f'"rows": [\n{rows}\n ]', 1)
        json_files.replace(path, text + "\n")


def read(path: Path) -> Record:
    """The inverse of :meth:`Record.write`.

    Raises:
        ValueError: the file is not one.
    """
    return json_files.read(path, SCHEMA, lambda raw: Record(**raw))


def resumed(path: Path, fresh: Record) -> Record:
    """The record in the file, or ``fresh`` where there is no file.

    Raises:
        ValueError: the file has another experiment, size or version.
    """
    if not path.exists():
        return fresh
    old = read(path)
    for what in ("experiment", "full", "versions"):
        if getattr(old, what) != getattr(fresh, what):
            raise ValueError(
                f"{path}: expected {what} {getattr(fresh, what)}, got {getattr(old, what)}; "
                f"without --resume the file is written anew"
            )
    return old


def claims(found: list[Claim]) -> list[dict[str, Any]]:
    """The statements as they come back from JSON."""
    made: list[dict[str, Any]] = as_json([dataclasses.asdict(claim) for claim in found])
    return made


def as_json(value: Any) -> Any:
    """The value as it comes back from JSON: tuples are lists."""
    return json.loads(json.dumps(value))
