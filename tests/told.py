"""A check of the functions by which ranks exchange small values, for every communication library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import MOST_BYTES


def check(tell: Callable[[Any, str], list[Any]], rank: int) -> None:
    """Fails unless two ranks get each other's values, and both raise if one value is too long."""
    value = [{"rank": rank}, [None, float("inf")], "\u00e9" * rank]
    told = tell(value, "told")
    assert [one[0]["rank"] for one in told] == [0, 1]
    assert told[rank] == value
    with pytest.raises(ExchangeError, match=f"expected messages of at most {MOST_BYTES} bytes"):
        tell("a" * MOST_BYTES * rank, "told too much")
