"""Compressors that are dropped take their tensors, threads and connections along."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hvd_compress.distributed as of_all_reduce
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ddp.probes import Probe, distributed, exchange
from tests.freed import assert_freed
from tests.ranks import on_ranks
from tests.torch_models import targets

SHAPES = {"a": (40, 70), "b": (3000,)}


@on_ranks(2, launcher="torchrun")
def test_a_dropped_compressor_of_a_model() -> None:
    def make() -> list[object]:
        ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot")
        for step in range(2):
            exchange(ddp, targets(SHAPES, dist.get_rank(), step))
        kept = compressor.state_dict()["tensors"].values()
        return [compressor, *ddp.parameters(), *(one["residual"] for one in kept)]

    assert_freed(make)


@on_ranks(2, launcher="torchrun")
def test_a_dropped_compressor_of_an_all_reduce() -> None:
    def make() -> list[object]:
        compressor = of_all_reduce.Compressor(OneBit(), exchange="two_shot", threshold=0)
        for _ in range(2):
            of_all_reduce.all_reduce(torch.randn(3000), compressor, key="a")
        return [compressor, compressor.state_dict()["tensors"]["a"]["residual"]]

    assert_freed(make)

    def make_alone() -> list[object]:
        return make()[:1]

    assert_freed(make_alone, at_once=True)


@on_ranks(3, launcher="torchrun")
def test_groups_of_some_ranks_are_named_alike_after_others_were_freed() -> None:
    """Although ranks free them at different times."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        kept = []
        for _ in range(2):
            compressor = of_all_reduce.Compressor(
                OneBit(), exchange="two_shot", threshold=0, process_group=group
            )
            of_all_reduce.all_reduce(torch.randn(3000), compressor, key="a")
            if dist.get_rank() == 0:
                kept.append(compressor)
