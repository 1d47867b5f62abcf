"""The integer sum: ranks that fail, and codecs that cannot be added."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import (
    ECQ,
    ErrorFeedback,
    OneBit,
)
from hvd_compress.engine.levels import LevelBatch
from tests.ranks import on_ranks
from tests.torch.probes import distributed, exchange
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
WEAK = ErrorFeedback(0.01, 1.0)


def _start() -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES)
    options = {"exchange": "integer_sum", "threshold": 0}
    return model, hvdc.Compressor(model.named_parameters(), Route(ECQ(), WEAK), **options)


@on_ranks(3, alone=True)
def test_a_rank_that_fails_between_the_sums() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    error: tuple[type[Exception], str] = (
        hvdc.ExchangeError,
        "expected the levels of all 3 ranks, got those of 2",
    )
    if hvd.rank() == 1:
        error = (ArithmeticError, "on purpose")

        def failing(batch: Any, norms: torch.Tensor) -> torch.Tensor:
            def fail() -> torch.Tensor:
                raise ArithmeticError("on purpose")

            return batch._batch.guard(fail, batch._layout.words, torch.int32)

        LevelBatch.encode = failing  # type: ignore[method-assign]
    with pytest.raises(error[0], match=error[1]):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_change_to_a_codec_that_cannot_be_added() -> None:
    _, compressor = _start()
    with pytest.raises(ValueError, match="expected a codec of evenly spaced levels"):
        compressor.set_codec(OneBit())
