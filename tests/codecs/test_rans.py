"""The entropy coder: what goes in comes out, in as few bits as its table allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, rans


@pytest.mark.parametrize(
    ("counts", "expected"),
    (
        ([5], [16384]),
        ([0, 0, 7, 0], [0, 0, 16384, 0]),
        ([1, 1], [8192, 8192]),
        ([1, 1, 1], [5462, 5461, 5461]),
        ([1, 2**40, 0], [1, 16383, 0]),
        ([1] * 255, [64 + 64] + [64] * 254),
    ),
)
def test_frequencies(counts: list[int], expected: list[int]) -> None:
    assert rans.frequencies(np.array(counts)).tolist() == expected


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=255).filter(any))
def test_every_code_that_is_there_has_a_slot(counts: list[int]) -> None:
    table = rans.frequencies(np.array(counts))
    assert table.sum() == rans.TOTAL
    assert ((table > 0) == (np.array(counts) > 0)).all()


@pytest.mark.parametrize(
    ("count", "lanes"),
    ((1, 1), (2047, 1), (2048, 2), (4095, 2), (8192, 8), (16383, 8), (16384, 16), (65536, 16)),
)
def test_lanes(count: int, lanes: int) -> None:
    assert rans.lanes_of(count) == lanes


@pytest.mark.parametrize(
    ("bucket", "count", "lengths"),
    (
        (4096, 65536, [65536]),
        (4096, 65537, [65536, 1]),
        (65536, 140_000, [65536, 65536, 8928]),
        (192, 65536, [65472, 64]),
        ("tensor", 64_001, [64_000, 1]),
    ),
)
def test_chunks_are_whole_blocks(bucket: int, count: int, lengths: list[int]) -> None:
    assert rans.chunk_lengths(ECQ(bucket=bucket).layout((count,))) == lengths


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    alphabet = data.draw(st.integers(1, 255))
    count = data.draw(st.one_of(st.integers(1, 100), st.integers(1, 5000)))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    # From one code alone to all of them alike.
    skew = data.draw(st.floats(0, 20))
    symbols = (alphabet * random.random(count) ** (1 + skew)).astype(np.uint8)
    layout = ECQ(bucket=64).layout((count,))
    coded = rans.encode(symbols, layout, alphabet)
    assert coded.size % 4 == 0
    padded = np.concatenate([coded, np.zeros(12, np.uint8)])
    for stream in (coded, padded):
        assert np.array_equal(rans.decode(stream, layout, alphabet), symbols)


@pytest.mark.parametrize("skew", (0.0, 2.0, 6.0, 12.0))
def test_size_is_that_of_the_entropy(skew: float) -> None:
    count, alphabet = 2**18, 9
    random = np.random.default_rng(1)
    symbols = (alphabet * random.random(count) ** (1 + skew)).astype(np.uint8)
    shares = np.bincount(symbols, minlength=alphabet) / count
    entropy = -sum(share * np.log2(share) for share in shares if share)
    coded = rans.encode(symbols, ECQ().layout((count,)), alphabet)
    # Of each lane, 16 bits are lost; table and index.
    fixed = 4 * (16 * 2 + 4) + 20
    assert 8 * (coded.size - fixed) / count == pytest.approx(entropy, rel=0.005)
