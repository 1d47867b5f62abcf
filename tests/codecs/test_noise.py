"""The counter-based noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_compress.codecs import NoiseKey
from hvd_compress.codecs.noise import philox, uniform

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    (
        # Random123's known answers for philox4x32 with seven rounds.
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ),
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], block: tuple[int, ...]
) -> None:
    # A second column, so that a mix-up of axes would show.
    words = np.array([counter, (1, 2, 3, 4)], np.uint32).T
    assert philox(words, key)[:, 0].tolist() == list(block)


def test_an_elements_place_in_the_noise() -> None:
    """Element i: word (i mod 64) // 16 of the block with first word 16 (i // 64) + i mod 16."""
    key = NoiseKey(seed=7, rank=3, tensor=11, step=(5 << 32) + 9)
    numbers = uniform(200, key)
    for i in (0, 1, 15, 16, 63, 64, 100, 199):
        counter = np.array([[16 * (i // 64) + i % 16], [11], [9], [5]], np.uint32)
        word = int(philox(counter, (7, 3))[i % 64 // 16, 0])
        assert numbers[i] == word >> 8


@pytest.mark.parametrize("count", (0, 1, 63, 64, 65, 1000))
def test_numbers_do_not_depend_on_how_many_are_drawn(count: int) -> None:
    numbers = uniform(count, NoiseKey(1, 2, 3, 4))
    assert (numbers.dtype, numbers.shape) == (np.float32, (count,))
    assert np.array_equal(numbers, uniform(2000, NoiseKey(1, 2, 3, 4))[:count])


def test_numbers_are_uniform_integers_of_24_bits() -> None:
    count = 1 << 20
    numbers = uniform(count, NoiseKey())
    assert np.array_equal(numbers, np.floor(numbers))
    assert 0 <= numbers.min() <= numbers.max() < 2**24
    # A count of n draws that fall in one of 256 bins is within 5 sqrt(n p (1 - p)) of n p.
    bins = np.bincount((numbers / 2**16).astype(int), minlength=256)
    assert np.all(np.abs(bins - count / 256) <= 5 * np.sqrt(count / 256))
    lowest = np.bincount(numbers.astype(np.int64) & 0xFF, minlength=256)
    assert np.all(np.abs(lowest - count / 256) <= 5 * np.sqrt(count / 256))


def test_seeds_ranks_tensors_and_steps_are_independent() -> None:
    """Correlations of n uniform numbers are within 5 / sqrt(n) of zero where they are independent."""
    count = 20_000
    keys = [NoiseKey(*fields) for fields in itertools.product((0, 1), repeat=4)]
    keys += [NoiseKey(step=1 << 32), NoiseKey(seed=ALL_ONES), NoiseKey(rank=ALL_ONES)]
    drawn = np.array([uniform(count, key) for key in keys])
    correlation = np.corrcoef(drawn) - np.eye(len(keys))
    assert np.abs(correlation).max() <= 5 / np.sqrt(count)


def test_neighbouring_elements_are_independent() -> None:
    count = 1 << 18
    numbers = uniform(count, NoiseKey(3))
    for lag in (1, 15, 16, 17, 48, 63, 64, 65, 1024):
        left, right = numbers[:-lag], numbers[lag:]
        assert abs(np.corrcoef(left, right)[0, 1]) <= 5 / np.sqrt(count - lag)


@pytest.mark.parametrize(
    "fields",
    ({"seed": -1}, {"seed": 1 << 32}, {"rank": -1}, {"tensor": 1 << 32}, {"step": 1 << 64}),
    ids=str,
)
def test_keys_beyond_their_words_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"NoiseKey\.\w+: expected an integer in .*, got "):
        NoiseKey(**fields)
