"""The values that ranks send each other under Horovod and PyTorch besides gradients."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.ranks.values import check_lengths, deserialize, serialize, split


def tell(value: Any, name: str) -> list[Any]:
    """Returns every rank's value, in the order of ranks.

    Args:
        value: this rank's value, fit for JSON (:func:`hvd_compress.ranks.values.serialize`).
        name: the name of the collectives, the same on every rank.

    Raises:
        ExchangeError: a value is too long or was altered; raised on every rank.
    """
    content = serialize(value)
    own = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
    lengths = hvd.allgather(own, name=f"{name}.length").tolist()
    check_lengths(lengths)
    message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = hvd.allgather(message, name=f"{name}.value").numpy().tobytes()
    return deserialize(split(gathered, lengths))
