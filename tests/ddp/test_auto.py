"""Auto under DDP: alike on every rank, and no gradient lost by a change of plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import OneBit
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, exchange, gradients_of
from tests.planner import process_groups
from tests.planner.process_groups import EXACT, Tensors
from tests.ranks import on_ranks


class _Job(process_groups.Job):
    def __init__(self, **options: Any) -> None:
        model = Probe(self.shapes)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        self.compressor = hvdc.Auto(self.ddp, **{"threshold": 100, **options})
        self.ddp.register_comm_hook(self.compressor, hvdc.hook)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        return exchange(self.ddp, gradients)


@on_ranks(2, launcher="torchrun")
def test_every_change_of_route_keeps_every_gradient() -> None:
    job = _Job(codecs=EXACT, exchanges=("allgather", "two_shot"))
    process_groups.every_change_of_route_keeps_every_gradient(job)


def _ranks_agree_on_every_plan() -> None:
    job = _Job(codecs=EXACT)
    process_groups.ranks_agree_on_every_plan(job)
    assert_equal_on_all_ranks(gradients_of(job.ddp))


@on_ranks(2, launcher="torchrun")
def test_two_ranks_agree_on_every_plan() -> None:
    _ranks_agree_on_every_plan()


@on_ranks(3, launcher="torchrun")
def test_three_ranks_agree_on_every_plan() -> None:
    _ranks_agree_on_every_plan()


@on_ranks(2, launcher="torchrun")
def test_a_plan_is_saved() -> None:
    process_groups.a_plan_is_saved(_Job(codecs=EXACT), _Job(codecs=EXACT))


@on_ranks(1, launcher="torchrun")
def test_what_auto_does_not_take() -> None:
    with pytest.raises(TypeError, match=r"Auto: .*unexpected keyword 'exchange'"):
        hvdc.Auto(Probe(_Job.shapes), exchange="two_shot")
    compressor = _Job().compressor
    with pytest.raises(
        ValueError, match="set_codec: expected a compressor with a codec of its own"
    ):
        compressor.set_codec(OneBit())
    assert compressor.settled and "one rank" in compressor.explain()
