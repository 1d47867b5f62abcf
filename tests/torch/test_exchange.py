"""Every codec through a stock DistributedOptimizer, against all ranks simulated by the reference."""

from __future__ import annotations

import gc

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import (
    ErrorFeedback,
    OneBit,
)
from hvd_compress.exchanges.comm import Comm, Group
from hvd_compress.torch.collectives import HorovodCollectives
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, Simulation, assert_same_bits, targets, two_valued

SHAPES = {"a": (40, 70), "b": (3000,), "c": (8, 3, 5, 5)}


@on_ranks(2)
def test_any_bytes_come_through_a_sum() -> None:
    collectives = HorovodCollectives(None, "bytes")
    messages = torch.randint(
        0, 256, (2, 2**20), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    messages[:, :1024], messages[0, 1024:2048] = 255, 0
    comm = Comm(Group(hvd.rank(), hvd.size()))
    handle = collectives.start(comm.all_gather(messages[hvd.rank()].clone()), "all")
    assert handle.own is not None  # As a sum.
    assert torch.equal(handle.wait(), messages)


@on_ranks(2, alone=True)  # Else what other tests leave may be freed meanwhile.
def test_a_step_frees_its_tensors_at_once() -> None:
    """Cycles would keep them until Python looks for cycles: memory would grow from step to step."""
    for chosen in ("allgather", "two_shot"):
        model = Probe(SHAPES)
        optimizer = distributed(model, hvdc.OneBit(model, threshold=0, exchange=chosen))
        gradients = [targets(SHAPES, hvd.rank(), step) for step in range(4)]
        exchange(model, optimizer, gradients[0])
        gc.collect()
        gc.disable()
        try:
            for one in gradients[1:]:
                exchange(model, optimizer, one)
            assert gc.collect() == 0, chosen
        finally:
            gc.enable()


def _same_as_stock(**options: object) -> None:
    """1-bit codes carry two-valued gradients without error: the result must be stock Horovod's."""
    rank = hvd.rank()
    model, plain = Probe(SHAPES), Probe(SHAPES)
    if "groups" in options and isinstance(options["groups"], list):
        names = options["groups"]
        ours = {**options, "groups": [[getattr(model, n) for n in group] for group in names]}
        stock = {**options, "groups": [[getattr(plain, n) for n in group] for group in names]}
    else:
        ours = stock = options
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0), **ours)
    reference = distributed(plain, hvd.Compression.none, **stock)
    for step in range(3):
        gradients = two_valued(SHAPES, rank, step)
        got = exchange(model, optimizer, gradients)
        assert_same_bits(got, exchange(plain, reference, gradients))


@on_ranks(2)
def test_groups() -> None:
    _same_as_stock(groups=[["b", "a"]])
    _same_as_stock(groups=2, gradient_predivide_factor=2.0)


@on_ranks(2)
def test_backward_passes_per_step() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    optimizer = distributed(model, compressor, backward_passes_per_step=2)
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(3):
        summed = []
        for rank in range(hvd.size()):
            halves = [targets(SHAPES, rank, 2 * step + half) for half in range(2)]
            summed.append({name: halves[0][name] + halves[1][name] for name in SHAPES})
        optimizer.zero_grad()
        for half in range(2):
            model(targets(SHAPES, hvd.rank(), 2 * step + half)).backward()
        optimizer.step()
        got = {name: p.grad for name, p in model.named_parameters()}
        assert_same_bits(got, simulation.average(summed))


@on_ranks(2)
def test_synchronize_before_step() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0))
    simulation = Simulation("allgather", OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    gradients = [targets(SHAPES, r, 0) for r in range(hvd.size())]
    model(gradients[hvd.rank()]).backward()
    optimizer.synchronize()
    expected = simulation.average(gradients)
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same_bits(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: -gradient for name, gradient in expected.items()},
    )


@on_ranks(1)
def test_a_single_rank_is_left_alone() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    gradients = targets(SHAPES, 0, 0)
    assert_same_bits(exchange(model, distributed(model, compressor), gradients), gradients)
    assert compressor.counters.steps == 0
