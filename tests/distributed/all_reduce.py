"""Compressors of ``all_reduce`` for the tests, and calls with named tensors."""

from __future__ import annotations

from typing import Any

import torch

import hvd_compress.distributed as hvdc
from hvd_compress import Route
from tests.contract.cases import USUAL
from tests.torch_models import DEVICE

LATE = DEVICE.type != "cpu"
"""Whether averages become NaN, and the next call raises the error, where the host does not wait."""


def make(exchange: str, **options: Any) -> hvdc.Compressor:
    return hvdc.Compressor(
        Route(*USUAL[exchange]), exchange=exchange, **{"threshold": 0, **options}
    )


def reduce(
    compressor: hvdc.Compressor, tensors: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    got = {name: tensor.clone() for name, tensor in tensors.items()}
    hvdc.all_reduce(list(got.values()), compressor, key=list(got), **options)
    return got


def residuals(compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
    tensors = compressor.state_dict()["tensors"]
    return {name: one["residual"].clone() for name, one in tensors.items()}
