"""The values that ranks send each other, as JSON: a pickle could run any code on the rank that reads it.

Lengths are sent first, and checked before any rank allocates memory for what follows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from hvd_compress.ranks.errors import ExchangeError

MOST_BYTES = 1 << 26
"""The most bytes of one rank's value: more than needed for millions of parameters. Every rank allocates
memory for the longest value."""

Record = TypeVar("Record")


def serialize(value: Any) -> bytes:
    """A value as JSON. Tuples become lists, and dataclasses objects; Inf and NaN are preserved."""
    return json.dumps(value, default=dataclasses.asdict).encode()


def deserialize(contents: Sequence[bytes]) -> list[Any]:
    """The ranks' values, from the results of :func:`serialize` in rank order.

    Raises:
        ExchangeError: a rank's content is not JSON.
    """
    values = []
    for rank, content in enumerate(contents):
        try:
            values.append(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise ExchangeError(
                f"expected a value as JSON from rank {rank}, got {len(content)} bytes that begin with "
                f"{content[:20]!r} ({error}): its message was altered in transit"
            ) from None
    return values


def records(kind: type[Record], values: Sequence[Any]) -> list[Record]:
    """The dataclass of each rank, from the values that were serialized.

    Raises:
        ExchangeError: a value has other fields.
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for rank, value in enumerate(values):
        if not isinstance(value, dict) or set(value) != names:
            got = list(value) if isinstance(value, dict) else type(value).__name__
            raise ExchangeError(
                f"expected {sorted(names)} from rank {rank}, got {got}: install the same version of "
                f"hvd_compress on every rank"
            )
    return [kind(**value) for value in values]


def check_lengths(lengths: Sequence[int], most: int = MOST_BYTES) -> None:
    """Raises :class:`ExchangeError` if a rank is about to send more bytes than there can be.

    Args:
        lengths: the lengths of the messages that follow, in the order of ranks.
        most: the most bytes of one message.
    """
    if min(lengths) < 0 or max(lengths) > most:
        raise ExchangeError(
            f"expected messages of at most {most} bytes, got lengths of {list(lengths)} by rank: a length "
            f"was altered in transit, or ranks have different models"
        )


def split(gathered: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The ranks' messages, from their concatenation in the order of ranks."""
    ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
    return [gathered[end - length : end] for end, length in zip(ends, lengths, strict=True)]
