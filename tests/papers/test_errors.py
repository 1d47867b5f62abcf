"""An error on one rank is raised on every rank; and Inf and NaN reach every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from hvd_compress.codecs import FP16, Int8, Ternary
from hvd_compress.exchanges.comm import Collective
from hvd_compress.papers import (
    ColumnParallelLinear,
    ExchangeError,
    ParallelGroup,
    PayloadError,
    RowParallelLinear,
    copy_to_parallel,
    gather_batch,
    gather_from_parallel,
    reduce_from_parallel,
    reduce_scatter_batch,
)
from hvd_compress.process_group.collectives import Collectives
from tests.cuda.executors import emulated_library, late_kernels
from tests.ranks import on_ranks
from tests.torch_models import DEVICE

CODECS = (Int8("linear", 64), FP16())


@pytest.fixture(autouse=True)
def built() -> None:
    """Before the ranks start, which would build it at the same time."""
    emulated_library()


@on_ranks(2, launcher="torchrun")
def test_sizes_that_do_not_divide() -> None:
    group = ParallelGroup(Int8())
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.out_features: expected a multiple"):
        ColumnParallelLinear(4, 7, group)
    with pytest.raises(
        ValueError, match=r"RowParallelLinear.in_features: expected a multiple of 2"
    ):
        RowParallelLinear(7, 4, group)
    with pytest.raises(ValueError, match="expected a multiple of 2 samples, one share a rank"):
        reduce_scatter_batch(torch.ones(3, 4), group)
    layer = ColumnParallelLinear(4, 6, group)
    with pytest.raises(ValueError, match=r"expected inputs of 4 features on each rank, got"):
        layer(torch.ones(3, 5))
    with pytest.raises(TypeError, match="activations: expected one of float32, float16, bfloat16"):
        gather_from_parallel(torch.ones(3, 5, dtype=torch.float64), group)
    assert layer(torch.ones(3, 4)).shape == (3, 6)  # Nothing is out of step.


@on_ranks(2, launcher="torchrun")
def test_ranks_that_differ() -> None:
    rank = dist.get_rank()
    with pytest.raises(ExchangeError, match="codec group: 64 on rank 0, 128 on rank 1"):
        ParallelGroup(Int8(group=64 * (rank + 1)))
    fixed = (
        "expected a codec whose payloads have a fixed size, such as .*coding='plain', got Ternary"
    )
    varying = Ternary(coding="entropy")
    with pytest.raises(ValueError, match=f"ParallelGroup.error_codec: {fixed}"):
        ParallelGroup(Int8(), error_codec=varying)
    wrong, message = (ExchangeError, "on rank 1") if rank == 0 else (ValueError, fixed)
    with pytest.raises(wrong, match=message):
        ParallelGroup(varying if rank else Int8())
    with pytest.raises(ExchangeError, match="exact_own: True on rank 0, False on rank 1"):
        ParallelGroup(Int8(), exact_own=rank == 0)
    group = ParallelGroup("int8")
    with pytest.raises(ExchangeError, match="in_features: 4 on rank 0, 5 on rank 1"):
        ColumnParallelLinear(4 + rank, 6, group)
    with pytest.raises(ExchangeError, match="layer: ColumnParallelLinear on rank 0, RowParallel"):
        (ColumnParallelLinear, RowParallelLinear)[rank](4, 6, group)
    with pytest.raises(ExchangeError, match=re.escape("shape: [2, 4] on rank 0, [3, 4] on rank 1")):
        gather_from_parallel(torch.ones(2 + rank, 4), group)
    with pytest.raises(ExchangeError, match="gather of activations on rank 0, sum of activations"):
        (gather_from_parallel, reduce_from_parallel)[rank](torch.ones(2, 4), group)
    layer = ColumnParallelLinear(4, 6, group)
    wrong, message = (ValueError, "got shape") if rank else (ExchangeError, "on rank 1")
    with pytest.raises(wrong, match=message):
        layer(torch.ones(3, 4 + rank))
    assert layer(torch.ones(3, 4)).shape == (3, 6)


@on_ranks(2)
def test_ranks_of_horovod_that_differ() -> None:
    import horovod.torch as hvd

    from hvd_compress.papers.horovod import HorovodTransport

    transport = HorovodTransport()
    with pytest.raises(ExchangeError, match="codec group: 64 on rank 0, 128 on rank 1"):
        ParallelGroup(Int8(group=64 * (hvd.rank() + 1)), transport=transport)
    group = ParallelGroup(Int8(), transport=transport)
    with pytest.raises(ExchangeError, match="shape: "):
        gather_from_parallel(torch.ones(2 + hvd.rank(), 4), group)
    assert gather_from_parallel(torch.ones(2, 4), group).shape == (2, 8)


@on_ranks(2, launcher="torchrun")
def test_inf_and_nan_are_seen_by_every_rank() -> None:
    for codec in CODECS:
        group = ParallelGroup(codec)
        for bad in (torch.inf, torch.nan):
            x = torch.ones(4, 6)
            if group.rank == 1:
                x[0, 0] = bad  # In what the other rank does not get in a reduce-scatter of its own.
            for exchange in (
                gather_from_parallel,
                reduce_from_parallel,
                gather_batch,
                reduce_scatter_batch,
            ):
                assert not exchange(x, group).isfinite().all(), (codec, bad, exchange)
            y = torch.ones(4, 6, requires_grad=True)
            copy_to_parallel(y, group).backward(x)
            assert not y.grad.isfinite().all()
        # Step by step again: nothing is left of it.
        assert reduce_from_parallel(torch.ones(4, 6), group).eq(2).all()


@on_ranks(2, launcher="torchrun")
def test_numbers_beyond_a_codecs_range_are_seen_by_their_own_rank_too() -> None:
    group = ParallelGroup(FP16())
    x = torch.full((2, 3), 1e6 if group.rank == 0 else 1.0)
    assert gather_from_parallel(x, group)[:, :3].isinf().all()
    assert reduce_from_parallel(x, group).isinf().all()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device reports errors later")
@on_ranks(2, launcher="torchrun")
def test_altered_payloads() -> None:
    group = ParallelGroup(Int8())
    x = torch.ones(4, 6)
    with _altering(group.rank == 1, 40):
        for exchange in (gather_from_parallel, reduce_from_parallel, gather_batch):
            with pytest.raises(PayloadError, match="activations: rank 1's payload: expected"):
                exchange(x, group)
    # The second of its two payloads, which rank 0 does not get.
    size = Int8().payload_bytes((2, 6))
    with _altering(group.rank == 0, size + 40):
        if group.rank == 1:
            with pytest.raises(PayloadError, match="activations: rank 0's payload: expected"):
                reduce_scatter_batch(x, group)
        else:
            reduce_scatter_batch(x, group)
            with pytest.raises(ExchangeError, match="PayloadError: activations: rank 0's payload"):
                gather_from_parallel(x, group)
    y = x.clone().requires_grad_()
    with _altering(group.rank == 1, 40), pytest.raises(PayloadError, match="error signals: rank 1"):
        copy_to_parallel(y, group).sum().backward()
    assert gather_from_parallel(x, group).eq(1).all()


@on_ranks(2, launcher="torchrun")
def test_altered_payloads_on_a_device() -> None:
    """The next exchange says which rank sent them, and in what."""
    group = ParallelGroup(Int8())
    x = torch.ones(4, 6)
    with late_kernels():
        for exchange in (gather_from_parallel, reduce_from_parallel):
            with _altering(group.rank == 1, 40):
                exchange(x, group)
            if x.is_cuda:
                torch.cuda.synchronize()
            with pytest.raises(PayloadError, match="activations: rank 1's payload: expected the"):
                exchange(x, group)
            dist.barrier()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"ParallelGroup.codec: expected a codec .* name, got 8"):
        ParallelGroup(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ParallelGroup.codec: expected one of .*, got 'int9'"):
        ParallelGroup("int9")
    with pytest.raises(TypeError, match=r"ParallelGroup.error_codec: expected a codec"):
        ParallelGroup(Int8(), error_codec=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ColumnParallelLinear.group: expected a ParallelGroup"):
        ColumnParallelLinear(4, 4, None)  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match=r"expected torch.distributed.init_process_group\(\)"):
        ParallelGroup(Int8())


@contextmanager
def _altering(here: bool, place: int) -> Iterator[None]:
    """Changes a bit of what this rank sends."""
    start = Collectives.start

    def altered(self: Collectives, collective: Collective) -> object:
        if here and collective.message.numel() > 48:  # Not a comparison.
            collective.message[place] ^= 16
        return start(self, collective)

    Collectives.start = altered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Collectives.start = start  # type: ignore[method-assign]
