"""Errors of exchanges that name tensors and ranks."""

from __future__ import annotations

from collections.abc import Sequence

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


def change_of_some(changed: Sequence[bool]) -> ExchangeError:
    """The error if only some ranks have called ``set_codec`` or ``reset``, or have loaded a state.

    Args:
        changed: whether each rank has called it; a single item if the ranks are not known.
    """
    ranks = [rank for rank, one in enumerate(changed) if one]
    who = "some ranks" if len(changed) == 1 else f"rank {', '.join(map(str, ranks))}"
    return ExchangeError(
        f"set_codec, reset, load_state_dict or load_resized: expected a call on every rank between the "
        f"same two steps, got one on {who} only"
    )
