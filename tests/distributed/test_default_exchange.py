"""The default exchange of what is built on ``all_reduce``, and of DDP among changing ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from hvd_compress import Int8, OneBit, Route
from hvd_compress.diloco import DiLoCo
from hvd_compress.optim import OneBitAdam
from tests.ranks import on_ranks
from tests.torch_models import Probe, Shapes, targets

SHAPES: Shapes = {"a": (40, 70), "b": (3000,)}


def _assert_exchange(routes: Mapping[str, Route], name: str, ranks: int) -> None:
    assert routes
    for route in routes.values():
        assert (route.exchange, route.reason) == (name, f"auto, {ranks} ranks")


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
