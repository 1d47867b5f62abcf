"""Every recipe on the pages for DiLoCo, an optimizer or a rare codec trains until it learns.

A recipe is a block of code, or a cell of the README's tables. It is run as it is printed; one without a
loop gets one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hvd_compress
import hvd_compress.ddp
from hvd_compress import diloco, optim
from tests.ranks import on_ranks
from tests.torch_models import DEVICE

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPE = re.compile(r"\b(DiLoCo|OneBitAdam|DoubleBuffering|PowerSGD|TopK)\(")
BLOCK, CELL = re.compile(r"```python\n(.*?)```", re.DOTALL), re.compile(r"\| `(hvdc\..*?)` \|")
FEATURES, CLASSES, BATCH, STEPS = 64, 10, 16, 1200


def recipes() -> dict[str, str]:
    """The code of each recipe, by page and line."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        for one in (*BLOCK.finditer(text), *CELL.finditer(text)):
            if RECIPE.search(one[1]):
                line = text.count("\n", 0, one.start()) + 1
                found[f"{page.relative_to(ROOT)}:{line}"] = one[1]
    return found


class Net(nn.Module):
    """Two layers, with the names that recipes use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(FEATURES, 128)
        self.layers = nn.ModuleList([nn.Linear(128, CLASSES)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](torch.relu(self.embedding(x)))


def trained(code: str) -> list[float]:
    """The losses of a training with a recipe's code."""
    torch.manual_seed(1)
    task, model, losses = torch.randn(FEATURES, CLASSES), Net(), []
    data = torch.Generator(DEVICE).manual_seed(100 + dist.get_rank())

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(STEPS):
            inputs = torch.randn(BATCH, FEATURES, generator=data)
            yield inputs, (inputs @ task).argmax(1)

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = nn.functional.cross_entropy(outputs, labels)
        losses.append(found.item())
        return found

    names: dict[str, Any] = {
        **{name: getattr(hvd_compress, name) for name in hvd_compress.__all__},
        **{"torch": torch, "functools": functools, "DiLoCo": diloco.DiLoCo},
        **{"model": model, "batches": batches(), "loss": loss, "workers": 2, "ranks_per_worker": 1},
        "hvdc": SimpleNamespace(**{**vars(hvd_compress.ddp), **vars(optim), **vars(diloco)}),
    }
    code = code.replace('"cuda"', repr(model.embedding.weight.device.type))
    if code.startswith("hvdc."):
        names["mesh"] = _mesh(model) if "mesh=" in code else None
        names["diloco" if "DiLoCo" in code else "optimizer"] = eval(code, names)
    else:
        exec(code, names)
    if not losses:
        assert names.keys() & {"diloco", "optimizer", "compressor"}, "expected what can be trained"
        _train(names)
    return losses


def _mesh(model: Net) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        model.embedding.weight.device.type, (2, 1), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh["shard"])
    return mesh


def _train(names: dict[str, Any]) -> None:
    model = names["model"]
    if "compressor" in names:
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(names["compressor"], hvd_compress.ddp.hook)
    optimizer = names.get("optimizer") or torch.optim.AdamW(model.parameters(), lr=0.001)
    for inputs, labels in names["batches"]:
        optimizer.zero_grad()
        names["loss"](model(inputs), labels).backward()
        optimizer.step()
        if "diloco" in names:
            names["diloco"].step()


@on_ranks(2, launcher="torchrun")
def test_every_recipe_learns() -> None:
    for where, code in recipes().items():
        losses = trained(code)
        first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
        assert last < 0.75 * first, f"{where}: loss {first:.3f} at first, {last:.3f} at last"


def test_every_kind_of_recipe_is_found() -> None:
    found = recipes()
    kinds = {kind for code in found.values() for kind in RECIPE.findall(code)}
    assert kinds == {"DiLoCo", "OneBitAdam", "DoubleBuffering", "PowerSGD", "TopK"}
    assert sum(where.startswith("README") for where in found) == 3
