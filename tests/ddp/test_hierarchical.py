"""The hierarchical exchange through a stock DistributedDataParallel, against the oracle's simulation."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
)
from hvd_compress.ddp.collectives import Collectives
from hvd_compress.exchange.shards import Shards
from tests.ddp import ways
from tests.ddp.probes import assert_equal_on_all_ranks, exchange
from tests.ddp.ways import NONE, SHAPES, Way
from tests.ranks import on_ranks
from tests.torch.probes import HierarchicalSimulation, targets

ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit("tensor"), ErrorFeedback(0.5, 0.75)),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), NONE),
]


def _local() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _simulate(
    codec: Codec, feedback: ErrorFeedback, ranks: int, seed: int
) -> HierarchicalSimulation:
    return HierarchicalSimulation(codec, feedback, SHAPES, ranks, _local(), seed)


def _owned(simulation: HierarchicalSimulation) -> dict[str, np.ndarray]:
    host, place = divmod(dist.get_rank(), _local())
    residuals = simulation.residuals[host]
    return {f"{n}, owned": residuals[n][simulation.part(n, place)] for n in SHAPES}


WAY = Way("hierarchical", OneBit(), ErrorFeedback(), _simulate, _owned)


@on_ranks(4, launcher="two nodes")
def test_every_codec_on_two_hosts_of_two_ranks() -> None:
    assert (_local(), dist.get_world_size()) == (2, 4)
    ways.every_codec(WAY, ROWS)


@on_ranks(2, launcher="two nodes")
def test_every_codec_on_two_hosts_of_one_rank() -> None:
    assert (_local(), dist.get_world_size()) == (1, 2)
    ways.every_codec(WAY, ROWS)


@on_ranks(2, launcher="two nodes")
def test_every_codec_on_one_host() -> None:
    two = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    ways.every_codec(WAY, ROWS)
    os.environ.update(two)


@on_ranks(1, launcher="two nodes")
def test_a_single_rank_exchanges_with_itself() -> None:
    ways.every_codec(WAY, ROWS)


@on_ranks(4, launcher="two nodes")
def test_forms_of_ddp() -> None:
    ways.forms_of_ddp(WAY)


@on_ranks(4, launcher="two nodes")
def test_memory_in_another_order_and_half_precision() -> None:
    ways.memory_in_another_order_and_half_precision(WAY)


@on_ranks(4, launcher="two nodes")
def test_parameters_that_are_not_used() -> None:
    """By one rank: the average of its host has zeros from it."""
    ways.parameters_that_are_not_used(WAY, [{"a"}, {"b", "c"}, {"c"}, set()])


@on_ranks(4, launcher="two nodes")
def test_a_nonfinite_gradient_on_one_rank() -> None:
    for view, bad in ((False, math.inf), (True, math.nan)):
        ddp, compressor = WAY.start(gradient_as_bucket_view=view)
        rank = dist.get_rank()
        for step in range(2):
            exchange(ddp, targets(SHAPES, rank, step))
        before = WAY.residuals(compressor)
        gradients = targets(SHAPES, rank, 2)
        if rank == 2:
            gradients["a"][30, 3] = bad
        got = exchange(ddp, gradients)
        assert not torch.isfinite(got["a"][30, 3])
        for name, kept in WAY.residuals(compressor).items():
            assert torch.isfinite(kept).all()
            assert torch.allclose(kept, before[name], atol=1e-5), (view, bad, name)
        got = exchange(ddp, targets(SHAPES, rank, 3))
        assert all(torch.isfinite(g).all() for g in got.values())
        assert_equal_on_all_ranks(got)


@on_ranks(4, launcher="two nodes")
def test_a_change_of_exchange_loses_no_mass() -> None:
    """From two shots, by way of the state, to hosts, back and forth, and from there to no compression."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(total)
    state = None
    for number, chosen in enumerate(("two_shot", "hierarchical", "allgather", "hierarchical")):
        ddp, compressor = WAY.start(exchange=chosen)
        if state is not None:
            compressor.load_state_dict(state)
        for step in range(2 * number, 2 * number + 2):
            gradients = WAY.gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            for name in SHAPES:
                total[name] += sum(g[name] for g in gradients) / 4
                sent[name] += got[name]
        state = copy.deepcopy(compressor.state_dict())
    compressor.set_codec(NoCompression())
    got = exchange(ddp, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert compressor.residual_norm() == 0
    for name in SHAPES:
        assert torch.allclose(sent[name] + got[name], total[name], atol=1e-4), name


@on_ranks(4, launcher="two nodes")
def test_counters_tell_what_leaves_the_host() -> None:
    ddp, compressor = WAY.start(bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    place = dist.get_rank() % 2
    parts = [Shards(math.prod(shape), 2, index) for index, shape in enumerate(SHAPES.values())]
    own, other = (sum(one.payload_bytes(OneBit())[p] for one in parts) for p in (place, 1 - place))
    flags = 16  # One bucket: five bytes, padded.
    dense = 4 * sum(one.length(1 - place) for one in parts)
    counters = compressor.counters
    assert counters.local_bytes == dense + 2 * (max(own, other) + flags)
    assert counters.wire_bytes - counters.local_bytes == own + flags
    assert counters.encoded_elements == sum(one.length(place) for one in parts)


@on_ranks(4, launcher="two nodes")
def test_uneven_inputs() -> None:
    ways.uneven_inputs(WAY, [3, 1, 4, 0])


@on_ranks(4, launcher="two nodes")
def test_an_owner_that_fails() -> None:
    ddp, compressor = WAY.start()
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "a: expected a payload from every rank, got none from rank 2, whose own error says why",
    )
    if dist.get_rank() == 2:
        error = (ArithmeticError, "on purpose")
        encode = compressor._kernels.encode

        def failing(codec: Codec, shape: tuple[int, ...], *rest: Any, **named: Any) -> None:
            if shape == (Shards(40 * 170, 2, 0).length(0),):
                raise ArithmeticError("on purpose")
            encode(codec, shape, *rest, **named)

        compressor._kernels.encode = failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    dist.barrier()  # All of them are still there.


@on_ranks(4, launcher="two nodes")
def test_an_altered_payload() -> None:
    ddp, _ = WAY.start(bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    gather = Collectives.gather

    def flip_a_bit(self: Collectives, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        rows, work = gather(self, message)
        if dist.get_rank() == 3 and message.numel() > 16:
            work.get_future().add_done_callback(lambda _: rows[0, 16 + 40].bitwise_xor_(16))
        return rows, work

    Collectives.gather = flip_a_bit  # type: ignore[method-assign]
    try:
        # Rank 2 gets what rank 3 has passed on; the other host has the bytes as they were.
        if dist.get_rank() < 2:
            exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
        else:
            message = r"\w+: in place \d, host 0's payload: expected"
            with pytest.raises(hvdc.PayloadError, match=message):
                exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    finally:
        Collectives.gather = gather  # type: ignore[method-assign]
    dist.barrier()


@on_ranks(3, launcher="two nodes")
def test_hosts_of_unequal_size() -> None:
    ddp, _ = WAY.start()
    message = r"hosts: .*place 0 of 2 on host 0 on rank 0, .* place 0 of 1 on host 1 on rank 2"
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


@on_ranks(2, launcher="two nodes")
def test_wrong_arguments_fail_at_construction() -> None:
    with pytest.raises(ValueError, match="contiguous groups for exchange='hierarchical'"):
        WAY.start(OneBit("column"))
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match="expected process_group=None for exchange='hierarchical'"):
        WAY.start(process_group=groups[dist.get_rank()])
    local = os.environ.pop("LOCAL_WORLD_SIZE")
    with pytest.raises(ValueError, match=r"expected LOCAL_RANK, .*, got .*LOCAL_WORLD_SIZE=''"):
        WAY.start()
    os.environ["LOCAL_WORLD_SIZE"] = local
