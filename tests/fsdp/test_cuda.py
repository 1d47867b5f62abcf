"""Shards that CUDA kernels encode, on real ranks; the kernels run on the host if there is no device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.fsdp as hvdc
from hvd_compress.codecs import Int8
from hvd_compress.engine.executors import Executors
from hvd_compress.exchanges.comm import Collective
from hvd_compress.process_group.collectives import Collectives
from tests.cuda.executors import emulated_library, late_kernels
from tests.fsdp.probes import SHAPES, Net, backward, mesh_of, shard
from tests.ranks import on_ranks
from tests.torch_models import targets


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the emulation before the ranks start, which would build it at the same time."""
    emulated_library()


@on_ranks(2, launcher="torchrun")
def test_the_end_of_a_backward_pass_waits_for_all_that_it_has_begun() -> None:
    """The tensors of all exchanges that were begun have been put in order."""
    ordered: list[torch.Tensor] = []
    put_in_order = Executors.order

    def order(kernels: Executors, tensor: torch.Tensor) -> None:
        ordered.append(tensor)
        put_in_order(kernels, tensor)

    net = shard(Net(SHAPES), mesh_of(1))
    hvdc.CompressedReduceScatter(net, Int8())
    with late_kernels(), mock.patch.object(Executors, "order", order):
        backward(net, targets(SHAPES, dist.get_rank(), 0))
    assert len(ordered) == 4  # Two modules, encoded and decoded.


@on_ranks(2, launcher="torchrun")
def test_an_altered_payload_is_an_error_at_the_end_of_its_backward_pass() -> None:
    net = shard(Net(SHAPES), mesh_of(1))
    hvdc.CompressedReduceScatter(net, Int8())
    start, rank = Collectives.start, dist.get_rank()

    def altering(self: Any, collective: Collective) -> Any:
        if collective.kind == "all_to_all" and rank == 1:
            collective.message[40] ^= 16  # For rank 0.
        return start(self, collective)

    told = r"gradients of (first|second): rank 1's payload: expected the checksum that Int8"
    kind = (hvdc.PayloadError, hvdc.ExchangeError)[rank]
    with late_kernels():
        with mock.patch.object(Collectives, "start", altering), pytest.raises(kind, match=told):
            backward(net, targets(SHAPES, rank, 0))
        got = backward(net, targets(SHAPES, rank, 1))
    assert all(one.isfinite().all() for one in got.values())
