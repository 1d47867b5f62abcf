"""The integer sum's widths and sizes, and what cannot take it."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from hvd_compress.codecs import ECQ, FP16, Codec, Int8, OneBit, Ternary
from hvd_compress.exchanges import integer_sum
from hvd_compress.exchanges.comm import Group


def test_lanes_grow_with_the_logarithm_of_the_ranks() -> None:
    widths = [integer_sum.bits_of(Ternary(), size) for size in (1, 2, 3, 4, 8, 64, 511)]
    assert widths == [2, 3, 3, 4, 5, 8, 10]
    assert [integer_sum.bits_of(ECQ(4), size) for size in (2, 4, 8)] == [5, 6, 7]


def test_levels_take_whole_words() -> None:
    codec = Ternary(64)
    # Blocks of 64 and one of 6, ten lanes a word.
    assert codec.level_words((70,), integer_sum.bits_of(codec, 2)) == 7 + 1


@pytest.mark.parametrize(("codec", "most"), ((Ternary(), 511), (ECQ(4), 127), (ECQ(127), 4)))
def test_lanes_as_long_as_halves_are_refused(codec: Codec, most: int) -> None:
    integer_sum.check("w", (1,), codec, 4, Group(0, most))
    with pytest.raises(ValueError, match=f"w: expected at most {most} ranks .* sums of 11 bits"):
        integer_sum.check("w", (1,), codec, 4, Group(0, most + 1))


@pytest.mark.parametrize("codec", (ECQ(coding="entropy"), Ternary(coding="entropy")), ids=str)
def test_entropy_coding_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"w: expected coding='plain' for exchange='integer_sum'"):
        integer_sum.check("w", (1,), codec, 4, Group(0, 2))


@pytest.mark.parametrize("codec", (OneBit(), Int8("linear"), FP16()), ids=str)
def test_codecs_without_levels_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"w: expected a codec of evenly spaced levels.*two_shot"):
        integer_sum.check("w", (1,), codec, 4, Group(0, 2))


def test_checks_add_up_and_find_changes() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.integers(-(2**28), 2**28, (7, 201))
    total, checks = ranks.sum(0), [integer_sum.check_of(words) for words in ranks]
    factors = [pow(3, place % 64, integer_sum.MODULUS) for place in range(total.size)]
    check = sum(map(operator.mul, factors, total.tolist())) % integer_sum.MODULUS
    assert integer_sum.check_of(total) == check == sum(checks) % integer_sum.MODULUS
    assert 512 * max(checks) < 2**31
    for place in (0, 63, 64, 200):
        for bit in range(32):
            altered = total.astype(np.int32)
            altered[place] ^= np.int32(-(2**31) if bit == 31 else 1 << bit)
            assert integer_sum.check_of(altered) != check
    # The same bit in two words that are not in one column, once set and once cleared.
    for other in (1, 5, 63, 65):
        altered = total.copy()
        altered[[0, other]] += 1 << 20, -(1 << 20)
        assert integer_sum.check_of(altered) != check
