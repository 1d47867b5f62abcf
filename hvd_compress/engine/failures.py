"""Errors of exchanges that name tensors and ranks."""

from __future__ import annotations

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.codecs.base import HEADER_BYTES
from hvd_compress.exchanges.shards import tells_of_a_failure
from hvd_compress.kernels.batch import BatchPayloadError
from hvd_compress.ranks.errors import ExchangeError


def explained(
    error: BatchPayloadError, payload: torch.Tensor, name: str, rank: int
) -> ExchangeError | PayloadError:
    """An error that names a tensor, and the rank that has sent its payload, shape=(bytes,), uint8.

    ``error`` is the one in which decoding has ended.
    """
    if tells_of_a_failure(payload[:HEADER_BYTES].cpu().numpy().tobytes()):
        return ExchangeError(
            f"{name}: expected a payload from every rank, got none from rank {rank}, whose own error says "
            f"why"
        )
    what = str(error).removeprefix(f"rank {error.rank}'s ")
    return PayloadError(f"{name}: rank {rank}'s {what}")
