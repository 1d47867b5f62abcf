"""Private names of PyTorch stand in three modules, whose tests fail where a version is without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hvd_compress

PACKAGE = Path(hvd_compress.__file__).parent

MODULES = {
    "engine/autograd.py",  # Tried by tests/distributed/test_private.py, and so is the next one.
    "process_group/private.py",
    "fsdp/sharding.py",  # Tried by tests/fsdp/test_private.py.
}

ELSEWHERE = {
    "engine/run.py": {"_is_profiler_enabled"},
    "exchanges/comm.py": {"_indices"},
    "torch/collectives.py": {
        "_get_process_set_ids_and_ranks"
    },  # Of Horovod, whose last release it is.
    "transformers/__init__.py": {"_get_output_dir"},
}
"""Other modules and their names, those of other packages included. ``torch._foreach_*`` are not listed."""


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (part for part in (node.module or "").split("."))


def test_private_names_of_pytorch() -> None:
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        if path.startswith(("tensorflow/", "keras/", "kernels/", "codecs/")) or path in MODULES:
            continue
        names = {name for name in _used(tree) if name.startswith("_") and name not in own}
        if foreign := {n for n in names if not n.endswith("__") and not n.startswith("_foreach_")}:
            found[path] = foreign
    assert found == ELSEWHERE
