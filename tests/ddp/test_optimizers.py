"""Steps of an optimizer reveal codecs that do not suit it, and compressors that were not registered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, OneBit
from hvd_compress.codecs import Codec
from tests.ranks import on_ranks

ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)


@contextmanager
def _told(text: str, times: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(one.message) for one in caught if text in str(one.message)]
    assert len(found) == times, [str(one.message) for one in caught]


def _step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@on_ranks(2, launcher="torchrun")
def test_one_bit_does_not_suit_adaptive_optimizers() -> None:
    cases: list[tuple[Callable[..., Any], Codec, int]] = [
        *((optimizer, OneBit(), 1) for optimizer in ADAPTIVE),
        (torch.optim.SGD, OneBit(), 0),
        (torch.optim.AdamW, Int8(), 0),
    ]
    for make, codec, times in cases:
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = make(model.parameters(), lr=0.1)
        compressor = hvdc.register(model, codec)
        with _told(f"expected OneBit with SGD or momentum, got {make.__name__}", times):
            _step(model, optimizer)
            _step(model, optimizer)
        if isinstance(codec, Int8):
            compressor.set_codec(OneBit())
            with _told("expected OneBit with SGD", 1):
                _step(model, optimizer)
                _step(model, optimizer)


@on_ranks(2, launcher="torchrun")
def test_only_the_parameters_that_one_bit_encodes_count() -> None:
    for encoded, times in (("0.weight", 0), ("1.weight", 1)):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        by_sgd, by_adam = (one.parameters() for one in model.module)
        hvdc.register(model, Int8(), layers={encoded: OneBit()})
        sgd, adam = torch.optim.SGD(by_sgd, lr=0.1), torch.optim.Adam(by_adam)
        with _told("expected OneBit with SGD", times):
            _step(model, sgd, adam)


@on_ranks(2, launcher="torchrun")
def test_a_compressor_that_nobody_registered_is_named_at_the_first_step() -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    compressor = hvdc.Compressor(model, Int8())
    optimizer = torch.optim.AdamW(model.parameters())
    with _told("expected an exchange by the compressor", 0):
        optimizer.step()
        get_optimizer_state_dict(model, optimizer)  # Makes a step with gradients of zeros.
    with _told(r"got a step of AdamW without one", 1):
        _step(model, optimizer)
        _step(model, optimizer)
    assert compressor.counters.steps == 0


@on_ranks(2, launcher="torchrun")
def test_a_registered_compressor_is_not_named() -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    hvdc.register(model, Int8(), warmup_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _told("expected an exchange by the compressor", 0):
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(2, 64)).sum().backward()
            _step(model, optimizer)


@on_ranks(2, launcher="torchrun")
def test_auto_says_that_there_is_nothing_to_choose() -> None:
    for outputs, codecs, times in ((1, ("fp16", "int8"), 1), (1, ("fp16",), 0), (64, ("int8",), 0)):
        model = DistributedDataParallel(nn.Linear(64, outputs))
        with _told("threshold=1024", times):
            hvdc.register(model, "auto", codecs=codecs)
            for _ in range(2):
                _step(model)
