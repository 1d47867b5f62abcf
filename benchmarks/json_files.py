"""Reads and writes the benchmarks' JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def replace(path: Path, text: str) -> None:
    """Writes a file atomically: a program that is stopped leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    os.replace(draft, path)


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON, atomically."""
    replace(path, json.dumps(record, indent=1) + "\n")


def read(path: Path, schema: str, make: Callable[[dict[str, Any]], T]) -> T:
    """Reads a file, and returns ``make`` of its content without the schema.

    Raises:
        ValueError: the file has another schema, or ``make`` raises an error.
    """
    try:
        raw = json.loads(path.read_text())
        if raw.pop("schema") != schema:
            raise ValueError("another schema")
        return make(raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected JSON of schema {schema}: {error}") from error
