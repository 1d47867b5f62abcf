"""What ranks of a process group tell each other beside their gradients: values, and states."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from hvd_compress.process_group.collectives import Collectives
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import MOST_BYTES, check_lengths, deserialize, serialize

_STATE_BYTES = 64
"""Of a state, for each element of the model, at most: sixteen numbers of 32 bits."""


def tell(ranks: Collectives, value: Any, problem: Exception | None = None) -> list[Any]:
    """Every rank's value, by rank; an error of one rank is one of all.

    Args:
        ranks: all of them call it.
        value: this rank's, fit for JSON (:func:`hvd_compress.ranks.values.serialize`).
        problem: what is wrong on this rank; it is raised when the others know.

    Raises:
        ExchangeError: something is wrong on another rank; or a value is too long, or was altered.
    """
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    content = serialize([value, said])
    lengths = _lengths(ranks, len(content), MOST_BYTES)
    rows, work = ranks.all_gather(message(content, max(lengths), ranks.device))
    work.wait()
    told = deserialize(contents(rows, lengths))
    if problem is not None:
        raise problem
    for rank, (_, error) in enumerate(told):
        if error is not None:
            raise ExchangeError(f"rank {rank}: {error}")
    return [one for one, _ in told]


def gather_states(ranks: Collectives, state: Any, elements: int) -> list[Any] | None:
    """Every rank's state, by rank, on the first one; None on the others.

    Args:
        ranks: all of them call it.
        state: this rank's, which ``torch.load`` can read with ``weights_only=True``.
        elements: of the model, which limit a state's length.

    Raises:
        ExchangeError: on every rank, a state is too long; on the first one, it was altered.
    """
    content = _saved(state)
    lengths = _lengths(ranks, len(content), _most(elements))
    rows = ranks.gather(message(content, max(lengths), ranks.device))
    return None if rows is None else [_loaded(one) for one in contents(rows, lengths)]


def broadcast_state(ranks: Collectives, state: Any, source: int, elements: int) -> Any:
    """One rank's state, on every rank.

    Args:
        ranks: all of them call it.
        state: as of :func:`gather_states`; only the source's counts.
        source: the rank.
        elements: as of :func:`gather_states`.

    Raises:
        ExchangeError: on every rank, the state is too long, or is not one that ``torch.load`` can read with
            ``weights_only=True``.
    """
    content = _saved(state) if ranks.rank == source else b""
    length = _lengths(ranks, len(content), _most(elements))[source]
    sent = message(content, length, ranks.device)
    ranks.broadcast(sent, source)
    return _loaded(contents(sent[None], [length])[0])


def message(content: bytes, length: int, device: torch.device) -> torch.Tensor:
    """Bytes as a tensor, with zeros behind them, shape=(length,), uint8."""
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def contents(rows: torch.Tensor, lengths: Sequence[int]) -> list[bytes]:
    """The bytes of gathered messages, shape=(ranks, bytes of the longest one), uint8."""
    pairs = zip(rows.cpu().numpy(), lengths, strict=True)
    return [row[:length].tobytes() for row, length in pairs]


def _lengths(ranks: Collectives, own: int, most: int) -> list[int]:
    rows, work = ranks.all_gather(torch.tensor([own], dtype=torch.int64, device=ranks.device))
    work.wait()
    lengths: list[int] = rows.view(-1).tolist()
    check_lengths(lengths, most)
    return lengths


def _most(elements: int) -> int:
    return MOST_BYTES + _STATE_BYTES * elements


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # Of many kinds, by what is wrong with the bytes.
        raise ExchangeError(
            f"expected a state of tensors, numbers, strings and containers of them, which torch.load reads "
            f"with weights_only=True, got another: name its classes to torch.serialization."
            f"add_safe_globals() on every rank; {error}"
        ) from None
