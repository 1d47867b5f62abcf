"""Values that ranks exchange, as bytes and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.values import (
    MOST_BYTES,
    check_lengths,
    deserialize,
    records,
    serialize,
    split,
)
from tests import pickles

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(_VALUES, min_size=1))
def test_values_come_back(values: list[Any]) -> None:
    contents = [serialize(value) for value in values]
    lengths = [len(content) for content in contents]
    assert deserialize(split(b"".join(contents), lengths)) == values


@given(st.floats(width=32))
def test_numbers_of_32_bits_come_back(number: float) -> None:
    (got,) = deserialize([serialize(float(np.float32(number)))])
    assert got == number or (math.isnan(got) and math.isnan(number))


@dataclass(frozen=True)
class _Record:
    pair: tuple[int, int] | None
    text: str


def test_tuples_are_lists_then_and_dataclasses_are_made_anew() -> None:
    sent = [_Record((1, 2), "é\ud800"), _Record(None, "")]
    told = deserialize([serialize(one) for one in sent])
    assert told[0]["pair"] == [1, 2]
    first, second = records(_Record, told)
    assert (first.text, second) == (sent[0].text, sent[1])
    for wrong in ({"pair": None}, [None, ""], {"pair": None, "text": "", "more": 1}):
        with pytest.raises(ExchangeError, match=r"expected \['pair', 'text'\] from rank 1, got"):
            records(_Record, [told[0], wrong])


def test_bytes_that_are_no_json_are_an_error_and_run_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for wrong in (pickles.leaving(trace), b"", b"[1, 2", b"\xff", b"[" * 10**6):
        with pytest.raises(ExchangeError, match="expected a value as JSON from rank 1, got"):
            deserialize([b"1", wrong])
    assert not trace.exists()


def test_lengths_that_cannot_be_true() -> None:
    check_lengths([0, MOST_BYTES])
    for wrong in ([3, MOST_BYTES + 1], [-1, 3]):
        with pytest.raises(ExchangeError, match="expected messages of at most") as raised:
            check_lengths(wrong)
        assert str(wrong) in str(raised.value)
