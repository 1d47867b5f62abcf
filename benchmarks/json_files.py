"""JSON files of benchmarks that go on where they stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def replace(path: Path, text: str) -> None:
    """Writes a file as a whole: a program that is stopped leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    os.replace(draft, path)


def read(path: Path, schema: str, make: Callable[[dict[str, Any]], T]) -> T:
    """What ``make`` makes of a file's content, without its schema.

    Raises:
        ValueError: not a file of that schema, or one that ``make`` cannot use.
    """
    try:
        raw = json.loads(path.read_text())
        if raw.pop("schema") != schema:
            raise ValueError("another schema")
        return make(raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected JSON of schema {schema}: {error}") from error
