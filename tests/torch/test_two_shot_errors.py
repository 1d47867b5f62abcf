"""Failures between two shots are errors on every rank, and never a hang."""

from __future__ import annotations

import re
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress.exchanges import buckets
from tests import jobs
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


def _start(**options: Any) -> tuple[Probe, hvdc.Compressor, Any]:
    buckets.LIMIT = 3000  # "b" is in bucket 0, "a" in bucket 1.
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(
        model.named_parameters(), **{"exchange": "two_shot", "threshold": 100, **options}
    )
    return model, compressor, distributed(model, compressor)


def _raises(
    error: type[Exception], message: str, model: Probe, optimizer: Any, step: int = 1
) -> None:
    with pytest.raises(error, match=message):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))


@on_ranks(2, alone=True)
def test_another_owner_step_on_one_rank() -> None:
    model, _, optimizer = _start(owner_step=hvdc.AdaGrad(initial=0.5 * hvd.rank()))
    _raises(
        hvdc.ExchangeError,
        r"owner_step: AdaGrad\(.*initial=0\.0, .*\) on rank 0, AdaGrad\(.*initial=0\.5, .*\) on rank 1",
        model,
        optimizer,
    )


def _flip(compressor: hvdc.Compressor, chosen: str) -> None:
    """Alters a bit in the first payload of the last row of what one collective brings."""

    def alter(name: str, rows: torch.Tensor) -> None:
        if name == chosen:
            rows[-1, 40] ^= 16

    watch(compressor, result=alter)


@on_ranks(3, alone=True)
def test_a_payload_altered_on_its_way_to_its_owner() -> None:
    model, compressor, optimizer = _start()
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    if hvd.rank() == 1:
        _flip(compressor, "bucket 1, stage 0")
        error: tuple[type[Exception], str] = (
            hvdc.PayloadError,
            "a, as its owner: rank 2's payload: expected checksum",
        )
    else:
        error = (
            hvdc.ExchangeError,
            r"\w+: expected a payload from every rank, got none from rank 1",
        )
    _raises(*error, model, optimizer)


@on_ranks(2, alone=True)
def test_a_payload_altered_on_its_way_from_its_owner() -> None:
    model, compressor, optimizer = _start()
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    _flip(compressor, "bucket 1, stage 1")
    _raises(hvdc.PayloadError, "a: rank 1's payload: expected checksum", model, optimizer)


@on_ranks(2, alone=True)
def test_an_owner_step_that_fails_on_one_rank() -> None:
    def step(average: torch.Tensor, state: dict[str, Any]) -> None:
        if hvd.rank() == 1:
            raise ArithmeticError("on purpose")

    model, _, optimizer = _start(owner_step=step)
    error = (
        (ArithmeticError, "on purpose")
        if hvd.rank() == 1
        else (hvdc.ExchangeError, "got none from rank 1, whose own error says why")
    )
    _raises(*error, model, optimizer)


@on_ranks(2, alone=True)
def test_an_owner_that_has_joined_cannot_step() -> None:
    model, _, optimizer = _start(owner_step=hvdc.AdaGrad())
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    if hvd.rank() == 1:
        with pytest.raises(Exception, match=r"shut down|closed|reset|failed"):
            hvd.join()
        return
    _raises(
        hvdc.ExchangeError,
        r"expected all 2 ranks to take part in a step with an owner_step, got some that have called",
        model,
        optimizer,
    )
    raise jobs.Leave


def test_a_rank_that_dies_between_the_shots() -> None:
    job = ("tests.torch.dying_rank", "two_shot", "bucket 0, stage 1")
    printed = jobs.run("horovodrun", 3, jobs.forked("horovodrun", *job))
    for rank in (0, 2):
        assert re.search(f"rank {rank} stopped after .* s by HorovodInternalError", printed), (
            printed
        )
