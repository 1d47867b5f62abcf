"""Ranks that fail within an exchange, and what an exchange refuses: an error on every rank, and no hang."""

from __future__ import annotations

import datetime
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ECQ, Int8, OneBit
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.run import Run
from hvd_compress.process_group.driver import Driver
from tests import jobs
from tests.contract.cases import SHAPES, USUAL
from tests.ddp.probes import distributed, exchange
from tests.ranks import on_ranks
from tests.torch_models import Probe, targets


def _start(name: str, **options: Any) -> tuple[Any, hvdc.Compressor]:
    return distributed(Probe(SHAPES), *USUAL[name], exchange=name, **options)


@on_ranks(2, launcher="torchrun", alone=True)
def test_an_owner_that_fails_between_two_shots() -> None:
    ddp, _ = _start("two_shot")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        r"\w+: expected a payload from every rank, got none from rank 1",
    )
    if dist.get_rank() == 1:
        error = (ArithmeticError, "on purpose")

        def failing(*arguments: Any) -> Any:
            raise ArithmeticError("on purpose")

        Batch.average = failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_second_shot_that_cannot_be_started() -> None:
    """An error in a process group's thread must reach the waiting thread, and end the rank."""
    ddp, _ = _start("two_shot")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[BaseException], str] = (
        RuntimeError,
        "closed by peer|reset by peer|Broken pipe|timed out",
    )
    if dist.get_rank() == 1:
        error = (MemoryError, "on purpose")
        go_on = Driver._go_on

        def going_on(driver: Driver, course: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise MemoryError("on purpose")
            go_on(driver, course)

        Driver._go_on = going_on  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        for step in range(1, 20):  # A first shot may be over before the thread gets to it.
            exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    if dist.get_rank() == 1:
        raise jobs.Leave


@on_ranks(4, launcher="two nodes")
def test_an_owner_that_fails_between_hosts() -> None:
    ddp, _ = _start("hierarchical")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        r"\w+: expected a payload from every rank, got none from rank 2, whose own error says why",
    )
    if dist.get_rank() == 2:
        error = (ArithmeticError, "on purpose")

        def failing(*arguments: Any) -> Any:
            raise ArithmeticError("on purpose")

        encode, Batch.encode_averages = Batch.encode_averages, failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    if dist.get_rank() == 2:
        Batch.encode_averages = encode  # type: ignore[method-assign]


@on_ranks(4, launcher="two nodes")
def test_a_payload_altered_within_a_host() -> None:
    ddp, _ = _start("hierarchical", bucket_cap_mb=25)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    resume = Run.resume

    def flip_a_bit(run: Run, result: torch.Tensor) -> None:
        assert run.request is not None
        if dist.get_rank() == 3 and run.request.scope == "cross":
            result[0, 40].bitwise_xor_(16)
        resume(run, result)

    Run.resume = flip_a_bit  # type: ignore[method-assign]
    try:
        # Rank 2 gets what rank 3 has passed on; the other host has the bytes as they were.
        if dist.get_rank() < 2:
            exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
        else:
            message = r"\w+: rank 1's payload: expected"
            with pytest.raises(hvdc.PayloadError, match=message):
                exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    finally:
        Run.resume = resume  # type: ignore[method-assign]


@on_ranks(3, launcher="two nodes")
def test_hosts_of_unequal_size() -> None:
    ddp, _ = _start("hierarchical")
    message = (
        r"hosts: .*local rank 0 of 2 on host 0 on rank 0, .* local rank 0 of 1 on host 1 on rank 2"
    )
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))


@on_ranks(2, launcher="two nodes")
def test_what_hosts_cannot_do() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match="expected process_group=None for exchange='hierarchical'"):
        _start("hierarchical", process_group=groups[dist.get_rank()])
    local = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "-1"
    with pytest.raises(ValueError, match=r"expected LOCAL_RANK .*, got .*LOCAL_WORLD_SIZE='-1'"):
        _start("hierarchical")
    os.environ["LOCAL_WORLD_SIZE"] = local
    ddp, compressor = _start("allgather")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    with pytest.raises(ValueError, match="a: expected a compressor that was made with exchange='h"):
        compressor.set_codec(Route(ECQ(), exchange="hierarchical", inner=Int8()))
    exchange(ddp, targets(SHAPES, dist.get_rank(), 1))


def _a_rank_that_fails(method: str) -> None:
    """Makes one rank fail; every rank must raise an error that names the gradients."""
    ddp, _ = _start("integer_sum")
    exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "expected the levels of all 3 ranks, got those of 2; the own errors",
    )
    if dist.get_rank() == 1:
        error = (ArithmeticError, "on purpose")
        stock = getattr(ECQ, method)

        def failing(*arguments: Any) -> None:
            raise ArithmeticError("on purpose")

        setattr(ECQ, method, failing)
    with pytest.raises(error[0], match=error[1]):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 1))
    if dist.get_rank() == 1:
        setattr(ECQ, method, stock)
    dist.barrier()  # All of them are still there.


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_between_the_sums() -> None:
    _a_rank_that_fails("to_levels")


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_fails_before_the_sums() -> None:
    _a_rank_that_fails("norms")


@on_ranks(2, launcher="torchrun")
def test_a_change_to_a_codec_that_cannot_be_added() -> None:
    _, compressor = _start("integer_sum")
    with pytest.raises(ValueError, match="expected a codec of evenly spaced levels"):
        compressor.set_codec(OneBit())


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_compressor_that_one_rank_has_registered() -> None:
    """The ranks wait for each other's collectives until a timeout, whose error then says why."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = torch.nn.parallel.DistributedDataParallel(Probe(SHAPES), process_group=group)
    compressor = hvdc.Compressor(model, OneBit())
    if dist.get_rank() == 0:
        model.register_comm_hook(compressor, hvdc.hook)
    with pytest.raises(RuntimeError) as caught:
        exchange(model, targets(SHAPES, dist.get_rank(), 0))
    if dist.get_rank() == 0:
        (note,) = caught.value.__notes__
        assert "trains without the compressor; give it to the model on every rank" in note
