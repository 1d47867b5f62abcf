"""No tensor of the package depends on users' default dtype or device: each call names both."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hvd_compress"

_MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
"""Functions of ``torch`` whose results depend on ``set_default_dtype`` or ``set_default_device``."""


def _unnamed(source: str) -> list[str]:
    """The calls that rely on a default dtype or device, each as a line number and text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, owner = node.func.attr, node.func.value
            of_torch = isinstance(owner, ast.Name) and owner.id == "torch"
            named = {keyword.arg for keyword in node.keywords}
            if of_torch and called in _MAKERS and not named >= {"dtype", "device"}:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
            # torch.Tensor(...) and the like take the defaults and cannot name others.
            if of_torch and called.endswith("Tensor"):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_names_its_dtype_and_its_device() -> None:
    found = {path: _unnamed(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_what_is_found() -> None:
    assert len(_unnamed("torch.zeros(3)\ntorch.ones(3, dtype=d)\ntorch.FloatTensor(3)")) == 3
    assert _unnamed("torch.zeros(3, dtype=d, device=e)\ntorch.zeros_like(x)\nnp.zeros(3)") == []
