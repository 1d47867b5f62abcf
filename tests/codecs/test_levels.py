"""Levels that ranks add: lanes, shared norms, and that payloads are made of the same levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, LevelCodec, NoiseKey, Ternary
from hvd_compress.codecs.packing import lane_bits, lane_words, pack_lanes, unpack_lanes
from tests.codecs.cases import normal, same_bits, special_values, through
from tests.codecs.rows import ROWS, Row

LEVEL_ROWS = [row for row in ROWS if isinstance(row.codec, LevelCodec)]
every_row = pytest.mark.parametrize("row", LEVEL_ROWS, ids=str)


def codec_of(row: Row) -> LevelCodec:
    """The row's codec, which has levels."""
    assert isinstance(row.codec, LevelCodec)
    return row.codec


@pytest.mark.parametrize(
    ("largest", "bits", "lanes"),
    ((1, 2, 16), (2, 3, 10), (3, 3, 10), (4, 4, 8), (8, 5, 6), (127, 8, 4), (511, 10, 3)),
)
def test_lanes_are_as_narrow_as_can_be(largest: int, bits: int, lanes: int) -> None:
    assert lane_bits(largest) == bits
    assert largest <= 2 ** (bits - 1) - 1 and largest > 2 ** (bits - 2) - 1
    assert lane_words(10 * lanes, bits) == 10 and lane_words(10 * lanes + 1, bits) == 11


@given(
    st.integers(1, 511),
    st.integers(1, 8),
    st.integers(0, 200),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_sums_of_words_are_words_of_sums(
    top: int, ranks: int, count: int, seed: int, data: st.DataObject
) -> None:
    bits = lane_bits(top * ranks)
    if bits > 16:
        return
    values = np.random.default_rng(seed).integers(-top, top, (ranks, count), endpoint=True)
    if data.draw(st.booleans()):  # The extremes, where a lane borrows from the next one.
        values = np.where(values < 0, -top, top)
    words = np.zeros(lane_words(count, bits), np.int64)
    for one in values:
        words += pack_lanes(one.astype(np.int32), bits)
        assert np.abs(words).max(initial=0) < 2**31, "no overflow on the way, signed as it is"
    total = unpack_lanes(words.astype(np.int32), count, bits)
    assert np.array_equal(total, values.sum(axis=0))


@every_row
@pytest.mark.parametrize("shape", ((1,), (64,), (5, 77), (2561,), (3, 1377)))
def test_payloads_are_made_of_the_same_levels(row: Row, shape: tuple[int, ...]) -> None:
    codec = codec_of(row)
    count = int(np.prod(shape))
    for x in (normal(shape), special_values(count)["very different magnitudes"]):
        with np.errstate(all="ignore"):
            norms = codec.norms(x)
            levels = codec.to_levels(x, norms, NoiseKey(rank=3))
            assert np.abs(levels).max() <= codec.top_level
            decoded = codec.from_levels(levels, norms)
        assert np.array_equal(decoded, through(codec, x, shape, rank=3))
        bits = lane_bits(codec.top_level)
        words = codec.pack_levels(levels, bits)
        assert words.shape == (codec.level_words(shape, bits),) and words.dtype == np.int32
        assert np.array_equal(codec.unpack_levels(words, count, bits), levels)


@every_row
def test_an_empty_tensor_has_no_words(row: Row) -> None:
    codec = codec_of(row)
    assert codec.level_words((0, 3), 2 + codec.top_level.bit_length()) == 0
    assert codec.pack_levels(np.empty(0, np.int32), 9).size == 0
    assert codec.unpack_levels(np.empty(0, np.int32), 0, 9).size == 0


@pytest.mark.parametrize("codec", (Ternary(64, clip=None), ECQ(3, "l2", 64), ECQ(2, "linf", 64)))
def test_a_larger_norm_leaves_the_expectation_where_it_is(codec: LevelCodec) -> None:
    """TernGrad, section 3.1: sharing the largest scaler keeps the estimate unbiased."""
    x = normal((256,), seed=5)
    norms = codec.norms(x) * np.float32(2.5)
    steps = 4000
    total = np.zeros(x.size)
    for step in range(steps):
        total += codec.from_levels(codec.to_levels(x, norms, NoiseKey(step=step)), norms)
    # A level's error is below a unit, and its variance below a quarter of its square.
    bound = 5 * codec.units(norms).max() / 2 / np.sqrt(steps)
    assert np.abs(total / steps - x).max() <= bound


@every_row
def test_buckets_that_are_not_finite_have_an_infinite_norm_and_no_levels(row: Row) -> None:
    codec = codec_of(row)
    for bad in (np.inf, -np.inf, np.nan):
        x = normal((200,))
        x[70] = bad
        with np.errstate(all="ignore"):
            norms = codec.norms(x)
            levels = codec.to_levels(x, norms, NoiseKey())
            decoded = codec.from_levels(levels, norms)
            expected = through(codec, x)
        assert np.isinf(norms).sum() == 1 and (norms[np.isinf(norms)] > 0).all()
        assert same_bits(np.isnan(decoded), np.isnan(expected))
        assert not levels[np.isnan(decoded)].any()


@every_row
def test_scales_too_small_for_a_reciprocal_send_nothing(row: Row) -> None:
    codec = codec_of(row)
    for name in ("zeros", "negative zeros", "smallest subnormals", "subnormals"):
        x = special_values(100)[name]
        norms = codec.norms(x)
        levels = codec.to_levels(x, norms, NoiseKey())
        assert not levels.any() and not codec.units(norms).any()
