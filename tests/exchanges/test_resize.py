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


@given(SIZES, SIZES, st.booleans())
def test_the_weight_of_all_that_is_unsent_stays(old: int, new: int, divided: bool) -> None:
    """Parts count in every rank's residual, if ranks do not divide the gradient any more."""
    own, parts = [3.0 * rank + 1.0 for rank in range(old)], [2.0**-rank for rank in range(old)]
    residuals = [(2.0 * numbers, 0.5) if numbers % 2 else None for numbers in own]
    handed = [resize.hand_on(residuals, parts, new, rank, divided=divided) for rank in range(new)]
    before = sum(numbers for numbers in own if numbers % 2) / old + sum(parts)
    after = sum(residual or 0.0 for residual, _ in handed) / new
    for _, total in handed if divided else ():
        assert total == sum(parts)
    assert abs(before - after - (sum(parts) if divided else 0.0)) <= 1e-12 * before
