"""1-bit SGD's quantizer, beyond the contract (Seide et al., 2014, section 3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import NoiseKey, OneBit
from hvd_compress.codecs.base import as_matrix
from hvd_compress.kernels.reference import quantize
from tests.codecs.cases import decode, encode, floats, normal, tensors, through


def test_the_two_values_are_the_means_of_the_two_sides() -> None:
    x = np.array([1.0, -2.0, 0.5, -4.0, 0.0, -0.0], np.float32)
    scales, codes = quantize(OneBit("tensor"), (6,), x, NoiseKey())
    assert scales.tolist() == [-3.0, 0.375]
    assert codes.tolist() == [0b110101, 0, 0, 0, 0, 0, 0, 0]


def test_an_empty_side_is_sent_as_zero() -> None:
    scales, _ = quantize(OneBit("tensor"), (3,), np.full(3, 2, np.float32), NoiseKey())
    assert scales.tolist() == [0.0, 2.0]
    scales, _ = quantize(OneBit("tensor"), (3,), np.full(3, -2, np.float32), NoiseKey())
    assert scales.tolist() == [-2.0, 0.0]


def test_lower_values_stand_before_upper_ones() -> None:
    x = np.concatenate([np.full(64, -1.0), np.full(64, 3.0), np.full(5, -5.0)]).astype(np.float32)
    scales, _ = quantize(OneBit(64), (133,), x, NoiseKey())
    assert scales.tolist() == [-1.0, 0.0, -5.0, 0.0, 3.0, 0.0]


def squared_error(x: np.ndarray, lower: float, upper: float) -> float:
    wide = x.astype(np.float64)
    return float(np.sum((wide - np.where(x >= 0, upper, lower)) ** 2))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_other_two_values_have_a_smaller_squared_error(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 200))
    x = data.draw(tensors(count, floats(1e4)))
    (lower, upper), _ = quantize(OneBit("tensor"), (count,), x, NoiseKey())
    best = squared_error(x, lower, upper)
    size = float(np.abs(x).max())
    # Moving a mean by d adds n d^2, which has to show above the mean's own rounding in float32.
    for step in (1e-3 * size, 0.1 * size, size):
        for low, up in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
            perturbed = squared_error(x, lower + low, upper + up)
            assert best <= perturbed + 1e-8 * size**2 * count


@pytest.mark.parametrize("shape", ((5, 7), (151, 3), (4, 3, 2, 2), (1, 9), (9,), ()), ids=str)
def test_columns_and_rows_equal_a_loop_over_the_matrix(shape: tuple[int, ...]) -> None:
    x = normal(shape)
    matrix = x.reshape(as_matrix(shape))
    for group, lines in (("column", matrix.T), ("row", matrix)):
        expected = np.empty_like(lines)
        for line, out in zip(lines, expected, strict=True):
            for side in (line >= 0, line < 0):
                out[side] = line[side].mean(dtype=np.float64) if side.any() else 0
        if group == "column":
            expected = expected.T
        decoded = through(OneBit(group), x, shape).reshape(matrix.shape)  # type: ignore[arg-type]
        np.testing.assert_allclose(decoded, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    (
        ((), (1, 1)),
        ((5,), (5, 1)),
        ((5, 7), (5, 7)),
        ((8, 3, 5, 5), (8, 75)),
        ((0,), (0, 1)),
        ((3, 0), (3, 0)),
        ((0, 3), (0, 3)),
    ),
)
def test_a_tensor_as_a_matrix(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert as_matrix(shape) == matrix


def test_sums_that_overflow_make_the_group_non_finite() -> None:
    x = np.full(128, 1e38, np.float32)
    x[64:] = 1.0
    decoded = decode(OneBit(64), (128,), encode(OneBit(64), (128,), x))
    assert np.isnan(decoded[:64]).all()
    assert np.array_equal(decoded[64:], x[64:])
