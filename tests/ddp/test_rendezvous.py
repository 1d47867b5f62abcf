"""Calls that every rank has to make between two steps: ranks wait for each other, and never without end."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import ErrorFeedback, Int8, OneBit
from hvd_compress.process_group import private, rendezvous
from tests import jobs
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.ranks import on_ranks
from tests.timeouts import timeout
from tests.torch_models import DEVICE, assert_same_bits, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}

_MISSING = "expected a call on every rank between the same two steps, got none from rank"


def _job() -> tuple[DistributedDataParallel, hvdc.Compressor]:
    """A model that has made two steps."""
    group = dist.new_group()
    ddp, compressor = distributed(Probe(SHAPES), OneBit(), ErrorFeedback(), process_group=group)
    for step in range(2):
        exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    return ddp, compressor


def _residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    return {n: t["residual"].clone() for n, t in tensors.items() if t["residual"] is not None}


@on_ranks(3, launcher="torchrun")
def test_a_rank_that_does_not_come() -> None:
    """The others name it when their time is over; it raises the same error if it comes later."""
    ddp, compressor = _job()
    rank, states = dist.get_rank(), [None] * 3
    dist.all_gather_object(states, copy.deepcopy(compressor.state_dict()))
    calls: dict[str, Callable[[], None]] = {
        "set_codec": lambda: compressor.set_codec(Int8()),
        "reset": compressor.reset,
        "load_state_dict": lambda: compressor.load_state_dict(states[rank]),
        "load_resized": lambda: compressor.load_resized(states),
    }
    for step, (name, call) in enumerate(calls.items(), 2):
        before, routes = _residuals(compressor), compressor.routes()
        dist.barrier()
        began = time.monotonic()
        message = f"{name}: {_MISSING} 1 in 2 seconds: nothing has changed; call it on every rank"
        if rank != 1:
            with timeout(ddp.process_group, 2), pytest.raises(hvdc.ExchangeError, match=message):
                call()
            assert time.monotonic() - began > 1.5
        dist.barrier()
        if rank == 1:
            with pytest.raises(hvdc.ExchangeError, match=message):
                call()
        assert_same_bits(_residuals(compressor), before)
        assert compressor.routes() == routes
        assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, step)))
    for call in calls.values():
        call()
        assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, 9)))


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_rank_that_goes_on_to_the_next_step() -> None:
    """Both ranks raise an error after the timeout; neither trains with another codec than the other."""
    ddp, compressor = _job()
    with timeout(ddp.process_group, 3):
        if dist.get_rank() == 0:
            with pytest.raises(hvdc.ExchangeError, match=f"set_codec: {_MISSING} 1 in 3 seconds"):
                compressor.set_codec(Int8())
            assert compressor.routes()["a"].codec == OneBit()
        else:
            with pytest.raises(
                RuntimeError, match=r"(?i)timeout|timed out|connection|closed|reset"
            ):
                exchange(ddp, targets(SHAPES, 1, 2))
    raise jobs.Leave


@on_ranks(3, launcher="torchrun")
def test_ranks_that_make_different_calls() -> None:
    """Every rank raises an error that names each rank's call, changes nothing, and may try again."""
    ddp, compressor = _job()
    rank, routes = dist.get_rank(), compressor.routes()
    before = _residuals(compressor)
    codec = r"codec: .*Int8\(kind='dynamic'.* on rank 0, 2, .*Int8\(kind='linear'.* on rank 1"
    with pytest.raises(hvdc.ExchangeError, match=rf"(?s)differ in.*{codec}"):
        compressor.set_codec(Int8("linear" if rank == 1 else "dynamic"))
    with pytest.raises(hvdc.ExchangeError, match=r"layers: \* on rank 0, 2, a on rank 1"):
        compressor.set_codec(Int8(), layers="a" if rank == 1 else "*")
    with pytest.raises(hvdc.ExchangeError, match="call: reset on rank 0, set_codec on rank 1, 2"):
        compressor.reset() if rank == 0 else compressor.set_codec(Int8())
    assert_same_bits(_residuals(compressor), before)
    assert compressor.routes() == routes
    assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, 2)))
    compressor.set_codec(Int8())
    assert compressor.routes()["a"].codec == Int8()
    assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, 3)))


@on_ranks(2, launcher="torchrun")
def test_calls_between_two_steps_of_which_one_rank_makes_more() -> None:
    """After the first of them, ranks no longer agree, and the next step compares their settings."""
    ddp, compressor = _job()
    for one in (Int8(), OneBit(128)):
        compressor.set_codec(one)
    exchange(ddp, targets(SHAPES, dist.get_rank(), 2))
    compressor.set_codec(Int8())
    if dist.get_rank() == 1:
        compressor.set_codec(OneBit())
    with pytest.raises(hvdc.ExchangeError, match=r"(?s)Int8.* on rank 0, .*OneBit.* on rank 1"):
        exchange(ddp, targets(SHAPES, dist.get_rank(), 3))
    dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_a_checkpoint_that_one_rank_cannot_read() -> None:
    """The others do not wait for it."""
    ddp, compressor = _job()
    kind, message = hvdc.ExchangeError, r"rank 1: (ValueError|KeyError): "
    states = hvdc.RankStates(compressor).state_dict()
    gathered: list[Any] = [hvdc.GatheredState(compressor).state_dict()]
    dist.broadcast_object_list(gathered)
    if dist.get_rank() == 1:
        kind, message = (ValueError, KeyError), "another rank|rank 1"
    for loader, saved in (
        (hvdc.GatheredState(compressor), gathered[0]),
        (hvdc.RankStates(compressor), states),
    ):
        with pytest.raises(kind, match=message):
            loader.load_state_dict({} if dist.get_rank() == 1 else saved)
        exchange(ddp, targets(SHAPES, dist.get_rank(), 2))
        loader.load_state_dict(saved)
        assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, dist.get_rank(), 2)))


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_comes_late_is_named_in_the_log() -> None:
    ddp, compressor = _job()
    warning = mock.Mock()
    if dist.get_rank() == 1:
        time.sleep(3)
    with (
        mock.patch.object(rendezvous, "_WARN_AFTER", 0.5),
        mock.patch.object(rendezvous._log, "warning", warning),
    ):
        compressor.set_codec(Int8())
    told = [format_ % arguments for (format_, *arguments), _ in warning.call_args_list]
    if dist.get_rank() == 0:
        (text,) = told
        assert f"set_codec: {_MISSING} 1 in " in text
    else:
        assert not told
    assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, dist.get_rank(), 2)))


@on_ranks(2, launcher="torchrun")
def test_the_store_keeps_nothing() -> None:
    ddp, compressor = _job()
    dist.barrier()
    before = private.job_store().num_keys()
    dist.barrier()
    compressor.set_codec(Int8())
    dist.barrier()
    assert private.job_store().num_keys() == before
    exchange(ddp, targets(SHAPES, dist.get_rank(), 2))


@on_ranks(2, launcher="torchrun")
def test_a_group_that_torch_does_not_know() -> None:
    """It has no store. Its ranks compare their settings in every step, as before the first one."""
    known: Any = dist.group.WORLD
    group = private.make_group(known, [0, 1], DEVICE)
    private.forget_group(group)
    assert private.is_unregistered(group)
    rank = dist.get_rank()
    changes: tuple[tuple[Callable[[hvdc.Compressor], None], str], ...] = (
        (lambda one: one.set_codec(OneBit()), r"(?s)Int8.* on rank 0, .*OneBit.* on rank 1"),
        (lambda one: one.reset(), "calls of reset: 0 on rank 0, 1 on rank 1"),
    )
    for change, message in changes:
        model = Probe(SHAPES)
        compressor = hvdc.Compressor(model, OneBit(), process_group=group, threshold=0)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        ddp.register_comm_hook(compressor, hvdc.hook)
        for step in range(2):
            assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, step)))
        compressor.set_codec(Int8())
        assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, rank, 2)))
        if rank == 1:
            change(compressor)
        with pytest.raises(hvdc.ExchangeError, match=message):
            exchange(ddp, targets(SHAPES, rank, 3))
        dist.barrier()
