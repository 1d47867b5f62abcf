"""The package loads no pickle, neither from another rank nor from a file: a pickle can run any code."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hvd_compress"

_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

_OF_USERS = {"tensorflow/elastic.py: hvd.broadcast_object"}
"""The files that may use pickles: Horovod's own class of elastic states sends users' objects by them."""


def _pickles(source: str) -> list[str]:
    """The expressions in a module's source that load pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in _MODULES else []
            found += [name.name for name in node.names if _of_objects(name.name)]
        elif isinstance(node, ast.Attribute) and _of_objects(node.attr):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
            safe = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
            name, value = safe[ast.unparse(node.func)]
            given = {k.arg: k.value for k in node.keywords}
            named = given.get(name)
            if not (isinstance(named, ast.Constant) and named.value is value):
                found.append(ast.unparse(node))
    return found


def _of_objects(name: str) -> bool:
    """Whether a function is a collective for pickled objects, by its name."""
    return name.endswith(("_object", "_object_list")) and name.startswith(
        ("all_gather", "allgather", "gather", "broadcast", "scatter", "send", "recv")
    )


def test_nothing_reads_pickles() -> None:
    found = {path: _pickles(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    named = {f"{p.relative_to(PACKAGE)}: {one}" for p, every in found.items() for one in every}
    assert named == _OF_USERS


def test_what_is_found() -> None:
    for source in (
        "import pickle",
        "import cloudpickle as c",
        "from pickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.all_gather_object(a, b)",
        "hvd.broadcast_object",
        "dist.send_object_list([a])",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
    ):
        assert len(_pickles(source)) == 1, source
    for source in ("torch.load(file, weights_only=True)", "ctypes.py_object(a)", "import json"):
        assert _pickles(source) == [], source
