"""Values that ranks tell each other, on whatever library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import MOST_BYTES


def check(tell: Callable[[Any, str], list[Any]], rank: int) -> None:
    """Values come back on two ranks; a length beyond all bounds is an error on both."""
    value = [{"rank": rank}, [None, float("inf")], "\u00e9" * rank]
    told = tell(value, "told")
    assert [one[0]["rank"] for one in told] == [0, 1]
    assert told[rank] == value
    with pytest.raises(ExchangeError, match=f"expected messages of at most {MOST_BYTES} bytes"):
        tell("a" * MOST_BYTES * rank, "told too much")
