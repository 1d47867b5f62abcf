"""A package of somebody else's with a codec, installed where a test asks for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
