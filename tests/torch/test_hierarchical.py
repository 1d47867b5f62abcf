"""The hierarchical exchange on two hosts, against all ranks simulated by the reference."""

from __future__ import annotations

import re
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import Codec, ErrorFeedback, OneBit
from tests import jobs
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES, dtype)
    options = {"exchange": "hierarchical", "threshold": 0, **options}
    return model, hvdc.Compressor(model.named_parameters(), Route(codec, feedback), **options)


def _raises_in_first_step(message: str, **options: Any) -> None:
    model, compressor = _start(**options)
    optimizer = distributed(model, compressor)
    with pytest.raises(hvdc.ExchangeError, match=message):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    hvd.barrier()  # A rank that leaves early would take Horovod with it.


@on_ranks(4, launcher="two hosts", alone=True)
def test_process_sets_that_horovod_does_not_take() -> None:
    _raises_in_first_step("expected a Horovod that takes process sets, got: Set HOROVOD_DYNAMIC")


@on_ranks(4, launcher="two hosts", environment=DYNAMIC, alone=True)
def test_an_altered_payload() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))

    def flip_a_bit(name: str, rows: torch.Tensor) -> None:
        if name == "bucket 0, stage 2":
            rows[-1, rows.shape[1] // 2 + 40] ^= 16  # Local rank 1, host 1.

    watch(compressor, result=flip_a_bit)
    with pytest.raises(hvdc.PayloadError, match="a: rank 3's payload: expected check"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))


def test_a_rank_that_dies_before_the_host_hears_from_the_others() -> None:
    """Horovod with dynamic process sets ends the other processes itself, before we can."""
    job = ("tests.torch.dying_rank", "hierarchical", "bucket 0, stage 2")
    printed = jobs.run("two hosts", 4, jobs.forked("two hosts", *job), DYNAMIC)
    assert "timed out" not in printed, printed
    assert all(float(taken) < 60 for taken in re.findall(r"after ([\d.]+) s by", printed)), printed
    assert re.search(
        r"rank \d stopped after .* s by HorovodInternalError|background loop uncaught exception: .*"
        r"(Connection (closed|reset) by peer|Broken pipe)",
        printed,
    ), printed
