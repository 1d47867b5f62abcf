"""Parameters' names are those of the user's own modules, whatever is wrapped around them."""

from __future__ import annotations

import torch
from torch import nn

from hvd_compress.engine.slots import slots_of


def _names(model: nn.Module) -> list[str]:
    return [slot.name for slot in slots_of(model)]


class _Wrapper(nn.Module):
    """A module that holds a model as DistributedDataParallel and similar wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_leave_no_trace_in_names() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    names = ["0.weight", "0.bias", "1.weight"]
    assert _names(model) == names
    assert _names(_Wrapper(model)) == names
    assert _names(_Wrapper(_Wrapper(torch.compile(model)))) == names
    model[1] = torch.compile(model[1])
    assert _names(model) == names


def test_a_users_own_module_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict(
        {"module": nn.Linear(1, 1, bias=False), "head": nn.Linear(1, 1, bias=False)}
    )
    assert _names(model) == ["module.weight", "head.weight"]
