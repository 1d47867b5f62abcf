"""A package of somebody else's with a codec, installed where a test asks for it."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_compress.codecs import CODECS

HERE = Path(__file__).parent


def install(folder: Path) -> str:
    """Puts the module and the metadata of pyproject.toml into a folder, as pip would; returns its path."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "twobit.py").write_text((HERE / "twobit.py").read_text())
    return str(folder)


@contextmanager
def installed() -> Iterator[None]:
    """In this process, and for as long as it takes: the package is installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = install(Path(folder) / "site")
        sys.path.insert(0, path)
        try:
            yield
        finally:
            sys.path.remove(path)
            CODECS.pop("twobit", None)
            sys.modules.pop("twobit", None)
