"""The default exchange of what is built on ``all_reduce``, and of DDP among changing ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress import Int8, OneBit, Route
from hvd_compress.codecs import ErrorFeedback
from hvd_compress.diloco import DiLoCo
from hvd_compress.engine.state import unsent
from hvd_compress.optim import OneBitAdam
from tests.ddp.probes import assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import Probe, Shapes, targets

SHAPES: Shapes = {"a": (40, 70), "b": (3000,)}


def _assert_exchange(routes: Mapping[str, Route], name: str, ranks: int) -> None:
    assert routes
    for route in routes.values():
        assert (route.exchange, route.reason) == (name, f"auto, {ranks} ranks")


@on_ranks(3, launcher="torchrun")
def test_ddp_among_fewer_ranks_and_more() -> None:
    """Nothing that was not sent is lost where three ranks become two, and two three."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    states: list[dict[str, Any]] = []
    for group, ranks, name in (
        (dist.group.WORLD, 3, "two_shot"),
        (pair, 2, "allgather"),
        (dist.group.WORLD, 3, "two_shot"),
    ):
        if rank < ranks:
            feedback = ErrorFeedback()
            ddp, compressor = distributed(Probe(SHAPES), OneBit(), feedback, process_group=group)
            _assert_exchange(compressor.routes(), name, ranks)
            if states:
                compressor.load_resized(states)
                after = _unsent([compressor.state_dict()])
                dist.all_reduce(after, group=group)
                torch.testing.assert_close(after / ranks, _unsent(states) / len(states))
            compressor.set_codec(Route(OneBit("column"), feedback))
            _assert_exchange(compressor.routes(), name, ranks)
            compressor.set_codec(Route(OneBit(), feedback))
            for step in range(2):
                got = exchange(ddp, targets(SHAPES, rank, step))
                assert_equal_on_all_ranks(got, group)
        everybodys: list[Any] = [None, None, None]
        dist.all_gather_object(everybodys, compressor.state_dict())
        states = everybodys[:ranks]
        owned = [one["owned"] is not None for s in states for one in s["tensors"].values()]
        assert set(owned) == {name == "two_shot"}
        assert _unsent(states).any()


def _unsent(states: list[dict[str, Any]]) -> torch.Tensor:
    """Returns the part of the gradients that all ranks have yet to add to the sum."""
    total = [
        sum(unsent(state["tensors"][name], shape) for state in states)
        for name, shape in SHAPES.items()
    ]
    return torch.cat([one for one in total if isinstance(one, torch.Tensor)])


@on_ranks(3, launcher="torchrun")
def test_optimizers_and_diloco_take_it() -> None:
    model = Probe(SHAPES)
    adam = OneBitAdam(model.named_parameters(), OneBit(), warmup_steps=1)
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = targets(SHAPES, dist.get_rank(), step)[name]
        adam.step()
    _assert_exchange(adam.compressor.routes(), "two_shot", 3)
    diloco = DiLoCo(model, Int8(), sync_every=1)
    diloco.step()
    _assert_exchange(diloco.compressor.routes(), "two_shot", 3)
