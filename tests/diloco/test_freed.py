"""A DiLoCo that is dropped takes its tensors, threads and connections along."""

from __future__ import annotations

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.diloco import DiLoCo
from tests.freed import assert_freed
from tests.ranks import on_ranks
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "b": (3000,)}


@on_ranks(2, launcher="torchrun")
def test_a_dropped_diloco() -> None:
    """With one shot and with two, with and without an exchange in progress."""
    for codec, exchange, delay in ((OneBit(), "allgather", 0), (Int8(), "two_shot", 1)):

        def make() -> list[object]:
            model = Probe(SHAPES)
            compressor = hvdc.Compressor(codec, exchange=exchange, threshold=0)  # noqa: B023
            diloco = DiLoCo(model, compressor, sync_every=2, delay=delay)  # noqa: B023
            for step in range(4):
                with torch.no_grad():
                    for name, values in targets(SHAPES, dist.get_rank(), step).items():
                        model.get_parameter(name).add_(values)
                diloco.step()
            diloco.synchronize()
            return [diloco, compressor, *model.parameters()]

        assert_freed(make, at_once=True)


@on_ranks(2, launcher="torchrun")
def test_one_that_is_dropped_before_its_first_step() -> None:
    """The model lives on, without what the DiLoCo had of it."""
    model = Probe(SHAPES)

    def make() -> list[object]:
        diloco = DiLoCo(model, OneBit(), sync_every=2)
        return [diloco, diloco.compressor, *diloco._common.copies.values()]

    assert_freed(make, at_once=True)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
