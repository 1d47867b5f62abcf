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
    "codecs": "numpy .codecs",
    "kernels": "numpy .codecs .kernels",
    "exchanges": "numpy .codecs .ranks .exchanges",
    "ranks": ".ranks",
    "elastic": "numpy horovod .ranks .elastic",
    "planner": "numpy .codecs .exchanges .ranks .planner",
    "engine": "numpy torch .codecs .kernels .exchanges .ranks .planner .engine",
    "torch": "numpy torch horovod .needs .codecs .elastic .kernels .exchanges .ranks .planner "
    ".engine .torch",
    "tensorflow": "numpy tensorflow horovod .needs .codecs .elastic .kernels .exchanges .ranks "
    ".planner .tensorflow",
    "keras": "numpy tensorflow keras horovod .needs .codecs .exchanges .ranks .tensorflow .keras",
    "distributed": "torch .needs .codecs .kernels .exchanges .ranks .engine .planner .distributed "
    ".process_group",
    "process_group": "torch .needs .codecs .kernels .exchanges .ranks .engine .process_group",
    "ddp": "torch .needs .codecs .kernels .exchanges .ranks .planner .engine .process_group .ddp",
    "diloco": "torch .needs .codecs .exchanges .ranks .engine .distributed .process_group .diloco",
    "optim": "torch .needs .codecs .exchanges .engine .distributed .process_group .optim",
    "papers": "torch horovod .needs .codecs .kernels .exchanges .ranks .engine .distributed "
    ".process_group .torch .papers",
    "fsdp": "torch .needs .codecs .exchanges .ranks .engine .planner .process_group .fsdp",
    "lightning": "torch lightning .needs .codecs .exchanges .ranks .ddp",
    "transformers": "torch transformers .needs .codecs .exchanges .process_group .ddp",
}
"""The packages that each package may import, besides the standard library; own ones begin with a dot."""


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


def _may(name: str, allowed: str) -> bool:
    top = name.split(".")[0]
    packages = [one if one[0] != "." else f"hvd_compress{one}" for one in allowed.split()]
    return top in sys.stdlib_module_names or any(
        name == package or name.startswith(package + ".") for package in packages
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
