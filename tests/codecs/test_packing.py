"""Bit planes and trits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_compress.codecs.packing import (
    pack_planes,
    pack_trits,
    plane_bytes,
    trit_bytes,
    unpack_planes,
    unpack_trits,
)
from hvd_compress.codecs.sums import column_sum, lane_sum
from tests.codecs.cases import normal

COUNTS = (1, 2, 19, 20, 21, 63, 64, 65, 127, 128, 129, 300, 2560)


def numbers(count: int, below: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, below, count).astype(np.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
def test_planes_come_back(bits: int) -> None:
    for count in COUNTS:
        codes = numbers(count, 1 << bits)
        packed = pack_planes(codes, bits)
        assert packed.size == plane_bytes(count, bits)
        assert np.array_equal(unpack_planes(packed, count, bits), codes)


def test_place_of_a_bit() -> None:
    codes = np.zeros(70, np.uint8)
    codes[10], codes[66] = 0b01, 0b10
    words = pack_planes(codes, 2).view("<u8")
    assert words.tolist() == [1 << 10, 0, 0, 1 << 2]


def test_trits_come_back() -> None:
    for count in COUNTS:
        digits = numbers(count, 3)
        packed = pack_trits(digits)
        assert packed.size == trit_bytes(count)
        assert packed.size % 4 == 0
        assert packed.max() < 243
        assert np.array_equal(unpack_trits(packed, count), digits)


def test_place_of_a_trit() -> None:
    digits = np.zeros(100, np.uint8)
    size = trit_bytes(100)
    assert size == 20
    for k in range(5):
        digits[:] = 0
        digits[k * size + 7] = 2
        packed = pack_trits(digits)
        assert packed[7] == 2 * 3**k
        assert packed.sum() == 2 * 3**k


def test_bytes_that_no_encoder_writes_decode_to_digits() -> None:
    every_byte = np.arange(256, dtype=np.uint8)
    digits = unpack_trits(every_byte, 5 * 256).reshape(5, 256)
    assert digits.max() == 2
    assert digits[:, 242].tolist() == [2, 2, 2, 2, 2]
    assert digits[:, 255].tolist() == [0, 1, 1, 0, 0]


def scalar_lane_sum(values: np.ndarray) -> Any:
    """The documented order, one addition at a time."""
    sums = []
    for start in range(0, max(values.size, 1), 2048):
        lanes = [values.dtype.type(0)] * 16
        for i, value in enumerate(values[start : start + 2048]):
            lanes[i % 16] = lanes[i % 16] + value
        for width in (8, 4, 2, 1):
            for lane in range(width):
                lanes[lane] = lanes[lane] + lanes[lane + width]
        sums.append(lanes[0])
    return sums[0] if len(sums) == 1 else scalar_lane_sum(np.array(sums))


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("count", (0, 1, 15, 16, 17, 100, 2047, 2048, 2049, 5000, 40_000))
def test_lane_sums_are_added_in_the_documented_order(count: int, dtype: type) -> None:
    values: np.ndarray = (normal((count,)) * np.float32(1e3)).astype(dtype)
    result = lane_sum(values)
    assert result.dtype == dtype
    assert result == scalar_lane_sum(values)


def test_lane_sums_along_the_last_axis() -> None:
    values = normal((6, 2, 333)).reshape(6, 2, 333)
    rows = [[lane_sum(row) for row in rows] for rows in values]
    assert np.array_equal(lane_sum(values), np.array(rows))


@pytest.mark.parametrize("rows", (1, 127, 128, 129, 300))
def test_column_sums_are_added_in_the_documented_order(rows: int) -> None:
    matrix = normal((rows, 3)).reshape(rows, 3)
    expected = []
    for column in matrix.T:
        total = np.float32(0)
        for start in range(0, rows, 128):
            partial = np.float32(0)
            for value in column[start : start + 128]:
                partial = partial + value
            total = total + partial
        expected.append(total)
    assert column_sum(matrix).tolist() == expected


def test_sums_never_end_in_a_negative_zero() -> None:
    zeros = np.full((3, 5), -0.0, np.float32)
    assert not np.signbit(lane_sum(zeros)).any()
    assert not np.signbit(column_sum(zeros)).any()
