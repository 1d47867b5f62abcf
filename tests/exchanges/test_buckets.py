"""Small tensors travel together, large ones alone, and all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.exchanges import buckets

COUNTS = st.lists(st.integers(1, 3 * buckets.LIMIT), max_size=40)


@given(COUNTS)
def test_every_tensor_is_in_one_bundle(counts: list[int]) -> None:
    tensors = list(enumerate(counts))
    made = buckets.compose(tensors)
    assert [n for bundle in made for n in bundle] == list(range(len(counts)))[::-1]
    for bundle in made:
        assert len(bundle) == 1 or sum(counts[n] for n in bundle) <= buckets.LIMIT
    assert buckets.compose(reversed(tensors)) == made


@pytest.mark.parametrize(
    ("limit", "counts", "expected"),
    (
        (10, [3, 3, 3, 3], [[3, 2, 1], [0]]),
        (10, [4, 3, 3], [[2, 1, 0]]),
        (10, [3, 50, 3], [[2], [1], [0]]),
        (10, [10, 11, 10], [[2], [1], [0]]),
        (0, [1, 1], [[1], [0]]),
        (10, [], []),
    ),
)
def test_known_bundles(
    limit: int, counts: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "LIMIT", limit)
    assert buckets.compose(enumerate(counts)) == expected
