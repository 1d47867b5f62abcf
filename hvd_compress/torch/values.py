"""What ranks tell each other under Horovod and PyTorch beside their gradients."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.ranks.values import check_lengths, deserialize, serialize, split


def tell(value: Any, name: str) -> list[Any]:
    """Every rank's value, by rank.

    Args:
        value: this rank's, fit for JSON (:func:`hvd_compress.ranks.values.serialize`).
        name: the same on every rank.

    Raises:
        ExchangeError: on every rank, a value is too long, or was altered.
    """
    content = serialize(value)
    own = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
    lengths = hvd.allgather(own, name=f"{name}.length").tolist()
    check_lengths(lengths)
    message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = hvd.allgather(message, name=f"{name}.value").numpy().tobytes()
    return deserialize(split(gathered, lengths))
