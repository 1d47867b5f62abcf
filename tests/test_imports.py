"""The packages import each other only as docs/architecture.md allows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hvd_compress"

ALLOWED = {
    "codecs": {"numpy", "hvd_compress.codecs"},
    "kernels": {"numpy", "hvd_compress.codecs", "hvd_compress.kernels"},
    "exchanges": {"numpy", "hvd_compress.codecs", "hvd_compress.ranks", "hvd_compress.exchanges"},
    "ranks": {"hvd_compress.ranks"},
    "elastic": {"numpy", "horovod", "hvd_compress.ranks", "hvd_compress.elastic"},
    "planner": {
        "numpy",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.planner",
    },
    "engine": {
        "torch",
        "numpy",
        "hvd_compress.codecs",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.planner",
        "hvd_compress.engine",
    },
    "torch": {
        "torch",
        "numpy",
        "horovod",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.elastic",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.planner",
        "hvd_compress.engine",
        "hvd_compress.torch",
    },
    "tensorflow": {
        "tensorflow",
        "numpy",
        "horovod",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.elastic",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.planner",
        "hvd_compress.tensorflow",
    },
    "keras": {
        "keras",
        "tensorflow",
        "numpy",
        "horovod",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.tensorflow",
        "hvd_compress.keras",
    },
    "distributed": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.engine",
        "hvd_compress.planner",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
    },
    "process_group": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.engine",
        "hvd_compress.process_group",
    },
    "ddp": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.planner",
        "hvd_compress.engine",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
        "hvd_compress.ddp",
    },
    "diloco": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.engine",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
        "hvd_compress.diloco",
    },
    "optim": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.engine",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
        "hvd_compress.optim",
    },
    "papers": {
        "torch",
        "horovod",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.kernels",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.engine",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
        "hvd_compress.torch",
        "hvd_compress.papers",
    },
    "fsdp": {
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.engine",
        "hvd_compress.planner",
        "hvd_compress.distributed",
        "hvd_compress.process_group",
        "hvd_compress.fsdp",
    },
    "lightning": {
        "lightning",
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.ranks",
        "hvd_compress.ddp",
    },
    "transformers": {
        "transformers",
        "torch",
        "hvd_compress.needs",
        "hvd_compress.codecs",
        "hvd_compress.exchanges",
        "hvd_compress.process_group",
        "hvd_compress.ddp",
    },
}
"""The packages that each package may import, besides the standard library."""


def _module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_of(path): path for path in PACKAGE.rglob("*.py")}


def _imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, also within functions and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}: relative imports hide the package that they import from"
            )
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)


def _may(name: str, allowed: set[str]) -> bool:
    top = name.split(".")[0]
    return top in sys.stdlib_module_names or any(
        name == package or name.startswith(package + ".") for package in allowed
    )


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        bad = [name for name in _imports(path) if not _may(name, ALLOWED[package])]
        assert not bad, f"{path.relative_to(PACKAGE)} imports {bad}"


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {name: MODULES.keys() & set(_imports(path)) - {name} for name, path in MODULES.items()}
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in free}
    # What is left is in a circle, or imports a file that is.
    assert not left, {name: sorted(imported & left.keys()) for name, imported in left.items()}


def test_exchanges_know_no_codec_by_name() -> None:
    """They may use only ``NoCompression`` and the registry's functions."""
    for path in (PACKAGE / "exchanges").rglob("*.py"):
        text = path.read_text()
        for codec in ("OneBit", "Int8", "Ternary", "ECQ", "BF16"):
            assert codec not in text, f"{path.name} knows {codec}"


@pytest.mark.parametrize(
    "module",
    (
        "hvd_compress",
        "hvd_compress.codecs",
        "hvd_compress.needs",
        "hvd_compress.kernels.copies",
        "hvd_compress.ranks.agreement",
        "hvd_compress.ranks.resize",
        "hvd_compress.exchanges.routing",
        "hvd_compress.ranks.token",
        "hvd_compress.exchanges.two_shot",
        "hvd_compress.command_line",
        "hvd_compress.horovod_wheel",
        "hvd_compress.planner.explain",
    ),
)
def test_importing_brings_no_framework(module: str) -> None:
    frameworks = "{'torch', 'tensorflow', 'keras', 'tf_keras', 'jax', 'horovod'}"
    code = f"import sys, {module}; print(sorted({frameworks} & sys.modules.keys()))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert printed.stdout.strip() == "[]"


@pytest.mark.parametrize("frontend", ("distributed", "ddp", "fsdp", "papers"))
def test_frontends_that_need_no_horovod(frontend: str) -> None:
    code = f"import sys, hvd_compress.{frontend}; print('horovod' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert printed.stdout.strip() == "False"
