"""Auto under DDP: alike on every rank, and no gradient lost by a change of plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, exchange, gradients_of
from tests.planner.budgets import MOST_STEPS, unlimited
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "small": (50,)}
EXACT = ("onebit", Route(Int8("linear"), ErrorFeedback()))
"""Codecs with full error feedback: what they do not send now they send later."""


def _start(**options: Any) -> tuple[torch.nn.parallel.DistributedDataParallel, hvdc.Auto]:
    ddp = torch.nn.parallel.DistributedDataParallel(Probe(SHAPES), bucket_cap_mb=0.01)
    compressor = hvdc.Auto(ddp, **{"threshold": 100, **options})
    ddp.register_comm_hook(compressor, hvdc.hook)
    return ddp, compressor


class _Balance:
    """Gradients that were computed, and gradients that came back."""

    def __init__(self) -> None:
        self._due = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self._sent = copy.deepcopy(self._due)

    def step(self, ddp: Any, step: int, scale: float = 1.0) -> None:
        gradients = [targets(SHAPES, rank, step, scale) for rank in range(dist.get_world_size())]
        got = exchange(ddp, gradients[dist.get_rank()])
        for name in SHAPES:
            self._due[name] += sum(one[name] for one in gradients) / dist.get_world_size()
            self._sent[name] += got[name]

    def check(self) -> None:
        for name in SHAPES:
            assert torch.allclose(self._sent[name], self._due[name], atol=1e-3), name


@on_ranks(2, launcher="torchrun")
def test_every_change_of_route_keeps_every_gradient() -> None:
    ddp, compressor = _start(codecs=EXACT, exchanges=("allgather", "two_shot"))
    balance = _Balance()
    choices = [tensor.choices for tensor in compressor._tensors]
    assert [len(routes) for routes in choices] == [5, 5, 5, 1]
    for step, turn in enumerate((0, 1, 2, 3, 4, 2, 0, 3, 1, 4, 0)):
        plan = [routes[(turn + i) % len(routes)] for i, routes in enumerate(choices)]
        compressor._planner.end_step = lambda seconds: False  # type: ignore[method-assign]
        compressor._apply(tuple(plan))
        balance.step(ddp, step)
    assert compressor.residual_norm() > 0
    compressor._apply((UNCOMPRESSED_ROUTE,) * len(SHAPES))
    balance.step(ddp, 11, scale=0.0)
    assert compressor.residual_norm() == 0
    balance.check()


def _the_ranks_agree() -> None:
    ddp, compressor = _start(codecs=EXACT)
    balance = _Balance()
    plans = set()
    waits: list[bool] = []
    compressor._wait_for_device = lambda: waits.append(compressor.settled)  # As on a GPU.
    with unlimited():
        for step in range(MOST_STEPS):
            balance.step(ddp, step)
            plans.add(str(compressor.routes()))
            if compressor.settled:
                break
    assert compressor.settled and len(plans) > 1, compressor.explain()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [compressor.explain(), str(compressor.routes()), sorted(plans)])
    assert all(text == texts[0] for text in texts)
    assert "decided" in texts[0][0] and "onebit" in texts[0][0]
    assert waits == [False] * step, "each step is timed when the device is done"
    assert_equal_on_all_ranks(gradients_of(ddp))
    compressor._apply((UNCOMPRESSED_ROUTE,) * len(SHAPES))
    balance.step(ddp, step + 1, scale=0.0)
    balance.check()
    assert len(waits) == step, "the device runs ahead of the host again"


@on_ranks(2, launcher="torchrun")
def test_two_ranks_agree_on_every_plan() -> None:
    _the_ranks_agree()


@on_ranks(3, launcher="torchrun")
def test_three_ranks_agree_on_every_plan() -> None:
    _the_ranks_agree()


@on_ranks(2, launcher="torchrun")
def test_a_plan_is_saved() -> None:
    ddp, compressor = _start()
    for step in range(MOST_STEPS):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
        if compressor.settled:
            break
    state = copy.deepcopy(compressor.state_dict())
    other, later = _start()
    other.load_state_dict(ddp.state_dict())
    later.load_state_dict(state)
    assert later.settled and later.routes() == compressor.routes()
    gradients = targets(SHAPES, dist.get_rank(), 1000)
    for one in (compressor, later):
        one._planner.end_step = lambda seconds: False  # type: ignore[method-assign]
    assert_same_bits(exchange(other, gradients), exchange(ddp, gradients))


@on_ranks(1, launcher="torchrun")
def test_what_auto_does_not_take() -> None:
    with pytest.raises(TypeError, match=r"Auto: .*unexpected keyword 'exchange'"):
        hvdc.Auto(Probe(SHAPES), exchange="two_shot")
    _, compressor = _start()
    with pytest.raises(
        ValueError, match="set_codec: expected a compressor with a codec of its own"
    ):
        compressor.set_codec(OneBit())
    assert compressor.settled and "one rank" in compressor.explain()
