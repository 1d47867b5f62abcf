"""Nothing unsent is lost, and nothing doubled, when the number of ranks changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
