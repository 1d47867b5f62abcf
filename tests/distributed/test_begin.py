"""An error with which one rank does not begin reaches the ranks that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from hvd_compress.papers import DoubleBuffering
from tests.ranks import on_ranks


def _adam(model: torch.nn.Module, **wrong: Any) -> OneBitAdam:
    return OneBitAdam(model.named_parameters(), OneBit(), **{"warmup_steps": 2, **wrong})


def _later_group(model: torch.nn.Module, **wrong: Any) -> None:
    optimizer = _adam(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    optimizer.add_param_group({"params": list(model.named_parameters()), **wrong})


def _buffering(model: torch.nn.Module, **wrong: Any) -> DoubleBuffering:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DoubleBuffering(model.named_parameters(), optimizer, OneBit(), **wrong)


def _diloco(model: torch.nn.Module, **wrong: Any) -> DiLoCo:
    return DiLoCo(model, OneBit(), **{"sync_every": 2, **wrong})


@on_ranks(2, launcher="torchrun")
def test_an_error_of_one_rank_is_one_of_all() -> None:
    cases: list[tuple[Callable[..., object], dict[str, Any], type[Exception]]] = [
        (_adam, {"lr": -1}, ValueError),
        (_adam, {"warmup_steps": 0}, ValueError),
        (_later_group, {"params": 3}, TypeError),
        (_buffering, {"enabled": 3}, TypeError),
        (_diloco, {"sync_every": 0}, ValueError),
        (_diloco, {"fragments": 7}, ValueError),
    ]
    for make, wrong, kind in cases:
        for guilty in range(2):
            model = torch.nn.Linear(40, 30)
            here = dist.get_rank() == guilty
            expected = kind if here else hvdc.ExchangeError
            match = "" if here else f"rank {guilty}: {kind.__name__}"
            with pytest.raises(expected, match=match):
                make(model, **(wrong if here else {}))
    assert _diloco(torch.nn.Linear(40, 30)).steps == 0, "the ranks can still begin together"
