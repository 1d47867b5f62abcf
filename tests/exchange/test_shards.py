"""Every element has exactly one owner, whatever the sizes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.codecs.base import TILE
from hvd_compress.exchange.shards import GRAIN, Shards

COUNTS = st.integers(0, 40 * GRAIN)
SIZES = st.integers(1, 70)
FIRSTS = st.integers(0, 200)


@settings(deadline=None)
@given(COUNTS, SIZES, FIRSTS)
def test_parts_tile_the_tensor(count: int, size: int, first: int) -> None:
    shards = Shards(count, size, first)
    ranges = sorted(shards.of(rank) for rank in range(size))
    filled = [(begin, end) for begin, end in ranges if begin < end]
    edges = [0, *(end for _, end in filled)]
    assert [begin for begin, _ in filled] == edges[:-1] and edges[-1] == count
    assert all(begin % TILE == 0 for begin, _ in filled)


@settings(deadline=None)
@given(COUNTS, SIZES, FIRSTS)
def test_parts_differ_by_one_grain_at_most(count: int, size: int, first: int) -> None:
    shards = Shards(count, size, first)
    grains = [-(-shards.length(rank) // GRAIN) for rank in range(size)]
    assert max(grains) - min(grains) <= 1


@settings(deadline=None)
@given(SIZES)
def test_small_tensors_are_not_all_one_ranks(size: int) -> None:
    owners = [
        next(rank for rank in range(size) if Shards(GRAIN, size, number).length(rank))
        for number in range(size)
    ]
    assert sorted(owners) == list(range(size))


@pytest.mark.parametrize(
    ("count", "size", "first", "ranges"),
    (
        (10, 1, 0, [(0, 10)]),
        (0, 3, 0, [(0, 0)] * 3),
        (3000, 2, 0, [(0, 1024), (1024, 3000)]),
        (3000, 2, 1, [(1024, 3000), (0, 1024)]),
        (5, 3, 0, [(0, 0), (0, 0), (0, 5)]),
        (6 * 1024 + 1, 3, 5, [(2048, 4096), (4096, 6145), (0, 2048)]),
    ),
)
def test_known_parts(count: int, size: int, first: int, ranges: list[tuple[int, int]]) -> None:
    assert [Shards(count, size, first).of(rank) for rank in range(size)] == ranges


@settings(deadline=None)
@given(COUNTS, SIZES, FIRSTS)
def test_lengths_count_the_owners(count: int, size: int, first: int) -> None:
    shards = Shards(count, size, first)
    assert shards.lengths() == Counter(shards.length(rank) for rank in range(size))
