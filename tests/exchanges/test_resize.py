"""Nothing unsent is lost, and nothing doubled, when the number of ranks changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.exchanges.shards import Shards
from hvd_compress.ranks import resize

SIZES = st.integers(1, 40)


@given(SIZES, SIZES)
def test_every_old_rank_has_one_heir_and_the_average_stays(old: int, new: int) -> None:
    taken = [resize.heirs(old, new, rank) for rank in range(new)]
    assert sorted(r for ranks, _ in taken for r in ranks) == list(range(old))
    unsent = [3.0 * rank + 1.0 for rank in range(old)]
    before = sum(unsent) / old
    after = sum(factor * sum(unsent[r] for r in ranks) for ranks, factor in taken) / new
    assert abs(before - after) <= 1e-12 * before


@given(st.integers(0, 30_000), SIZES, SIZES, st.integers(0, 9))
def test_owned_elements_go_to_their_new_owners(count: int, old: int, new: int, first: int) -> None:
    ranges = [Shards(count, old, first).of(rank) for rank in range(old)]
    seen = 0
    for rank in range(new):
        begin, end = Shards(count, new, first).of(rank)
        for owner, b, e in resize.overlaps(ranges, begin, end):
            assert ranges[owner][0] <= b < e <= ranges[owner][1]
            assert begin <= b and e <= end
            seen += e - b
    assert seen == count
