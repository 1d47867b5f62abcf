"""The split of a model into fragments."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvd_compress.diloco.fragments import split


def _parameters(*counts: int) -> dict[str, nn.Parameter]:
    return {f"p{i}": nn.Parameter(torch.zeros(count)) for i, count in enumerate(counts)}


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.data())
def test_fragments_are_equal_shares_in_order(counts: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(counts)))
    parameters = _parameters(*counts)

    found = split(parameters, number)

    assert len(found) == number and all(found)
    assert [name for names in found for name in names] == list(parameters)
    if number < len(counts) // 4:  # Otherwise a fragment may have to take what it gets.
        sizes = [sum(parameters[name].numel() for name in names) for names in found]
        assert max(sizes) <= sum(counts) / number + 2 * max(counts)


def test_fragments_by_name() -> None:
    found = split(_parameters(1, 1, 1), [["p2", "p0"], ["p1"]])

    assert found == [["p0", "p2"], ["p1"]]


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (0, "expected 1 to 3, the number of trainable parameters, got 0"),
        (4, "expected 1 to 3, the number of trainable parameters, got 4"),
        ([["p0"], ["p1"]], "expected each parameter in one fragment, got 'p2' in 0"),
        ([["p*"], ["p1"]], "expected each parameter in one fragment, got 'p1' in 2"),
        ([["p*", "q"]], "expected a pattern that matches a parameter's name, got 'q'"),
    ],
)
def test_fragments_that_do_not_cover_the_model(fragments: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        split(_parameters(1, 1, 1), fragments)  # type: ignore[arg-type]
