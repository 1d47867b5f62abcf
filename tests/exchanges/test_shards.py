"""Every element has exactly one owner, whatever the sizes."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import OneBit
from hvd_compress.codecs.checks import TILE
from hvd_compress.exchanges.shards import GRAIN, Shards, shared, transpose, transpose_back

COUNTS = st.integers(0, 40 * GRAIN)
SIDES = st.integers(1, 3000)
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


@pytest.mark.parametrize("group", ("row", "column"))
@settings(deadline=None)
@given(rows=SIDES, columns=SIDES, size=SIZES, first=FIRSTS)
def test_rows_and_columns_stay_whole(
    group: Literal["row", "column"], rows: int, columns: int, size: int, first: int
) -> None:
    found = shared(OneBit(group), (rows, columns))
    length = rows if group == "column" else columns
    shards = found.shards(size, first)
    parts = [shards.of(rank) for rank in range(size)]
    assert all(begin % length == 0 and end % length == 0 for begin, end in parts if begin < end)
    assert sum(end - begin for begin, end in parts) == rows * columns
    values = [  # Of the parts together, two a row or column, as the whole gradient has.
        found.codec.layout(shards.shape(end - begin)).scales for begin, end in parts if begin < end
    ]
    assert sum(values) == OneBit(group).layout((rows, columns)).scales


def test_columns_are_the_rows_of_the_transposed_matrix() -> None:
    x = np.arange(12, dtype=np.float32)
    matrix = shared(OneBit("column"), (3, 2, 2)).transposed
    assert matrix == (3, 4) and shared(OneBit("row"), (3, 2, 2)).transposed is None
    columns = transpose(x, matrix)
    assert columns.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert np.array_equal(transpose_back(columns, matrix), x)


@settings(deadline=None)
@given(COUNTS, SIZES, FIRSTS, st.integers(1, 2000))
def test_lengths_count_the_owners(count: int, size: int, first: int, row: int) -> None:
    shards = Shards(count, size, first, row)
    assert shards.lengths() == Counter(shards.length(rank) for rank in range(size))
