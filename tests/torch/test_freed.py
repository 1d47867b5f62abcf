"""Compressors that are dropped take their tensors and threads along."""

from __future__ import annotations

import horovod.torch as hvd

import hvd_compress.torch as hvdc
from tests.freed import assert_freed
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "b": (3000,)}


@on_ranks(2)
def test_a_dropped_compressor() -> None:
    """The compressor is dropped with its model and Horovod's optimizer."""
    for exchanged in ("allgather", "two_shot"):

        def make() -> list[object]:
            model = Probe(SHAPES)
            compressor = hvdc.OneBit(model, threshold=0, exchange=exchanged)  # noqa: B023
            optimizer = distributed(model, compressor)
            for step in range(2):
                exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
            kept = compressor.state_dict()["tensors"].values()
            return [compressor, *model.parameters(), *(one["residual"] for one in kept)]

        assert_freed(make)
        hvd.barrier()
