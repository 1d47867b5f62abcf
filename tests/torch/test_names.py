"""Parameters' names are those of the user's own modules, whatever is wrapped around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvd_compress.engine.parameters import slots_of


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


def test_parameters_without_values_and_those_of_two_names_are_refused() -> None:
    with pytest.raises(ValueError, match="weight: expected an initialized parameter, got"):
        _names(nn.LazyLinear(3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"got one parameter as 0\.weight and as 1\.weight"):
        slots_of(model.named_parameters(remove_duplicate=False))
