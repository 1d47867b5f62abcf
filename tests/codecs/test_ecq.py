"""The quantizer of QSGD and ECQ-SGD, beyond the contract (Wu et al., 2018, section 4)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_compress.codecs import ECQ, NoiseKey
from hvd_compress.codecs.packing import unpack_planes
from hvd_compress.kernels.reference import quantize
from tests.codecs.cases import normal, through


@pytest.mark.parametrize("levels", range(1, 128))
def test_a_code_takes_the_bits_that_the_paper_says(levels: int) -> None:
    assert ECQ(levels).bits == math.ceil(math.log2(2 * levels + 1))


@pytest.mark.parametrize("norm", ("l2", "linf"))
def test_the_scale_is_the_norm_over_the_levels(norm: str) -> None:
    x = np.array([3.0, -4.0, 0.0], np.float32)
    scales, _ = quantize(ECQ(4, norm, 64), x.shape, x, NoiseKey())  # type: ignore[arg-type]
    assert scales.tolist() == [{"l2": 5.0, "linf": 4.0}[norm] / 4]


def test_codes_are_the_level_plus_s() -> None:
    # Exactly on levels, so that no noise can move them.
    x = np.array([1.0, -1.0, 0.5, -0.25, 0.0, -0.0], np.float32)
    codec = ECQ(4, "linf", "tensor")
    for step in range(5):
        scales, packed = quantize(codec, x.shape, x, NoiseKey(step=step))
        assert unpack_planes(packed, 6, codec.bits).tolist() == [8, 0, 6, 3, 4, 4]
        assert np.array_equal(through(codec, x, step=step), x)
    assert scales.tolist() == [0.25]


@pytest.mark.parametrize("norm", ("l2", "linf"))
def test_an_element_becomes_one_of_its_two_neighbours_by_equation_9(norm: str) -> None:
    count, levels, value = 400_000, 4, 0.3
    x = np.full(count, value, np.float32)
    x[0] = 1.0
    codec = ECQ(levels, norm, "tensor")  # type: ignore[arg-type]
    scale = np.linalg.norm(x.astype(np.float64), None if norm == "l2" else np.inf)
    position = levels * value / scale
    lower = math.floor(position)
    decoded = through(codec, x)[1:]
    level = np.rint(decoded * levels / scale)
    assert set(level) <= {lower, lower + 1}
    chance = position - lower
    upper = np.count_nonzero(level == lower + 1)
    assert abs(upper - chance * count) <= 5 * math.sqrt(count * chance * (1 - chance))


@pytest.mark.parametrize(
    ("codec", "count", "factor"),
    (
        (ECQ(4, "l2", 4096), 10_000, 16.0),
        (ECQ(4, "l2", "tensor"), 10_000, 25.0),
        (ECQ(4, "l2", 4096), 100, 2.5),
        (ECQ(127, "l2", 4096), 10_000, 4096 / 127**2),
    ),
    ids=str,
)
def test_variance_factor_of_lemma_1(codec: ECQ, count: int, factor: float) -> None:
    assert codec.variance_factor(count) == pytest.approx(factor)


@pytest.mark.parametrize(("levels", "count"), ((1, 2), (1, 64), (4, 4096), (127, 4096), (7, 1)))
def test_the_variance_factor_of_linf_is_reached(levels: int, count: int) -> None:
    factor = ECQ(levels, "linf", "tensor").variance_factor(count)
    # In units of the scale: the largest element, and others where y (1 - y) - factor y^2 is largest.
    y = 1 / (2 * (1 + factor))
    error = (count - 1) * y * (1 - y)
    assert error == pytest.approx(factor * (levels**2 + (count - 1) * y**2))
    # No equal elements have a larger one.
    grid = np.linspace(0.001, levels, 20_000)
    errors = (count - 1) * (grid % 1) * (1 - grid % 1) / (levels**2 + (count - 1) * grid**2)
    assert errors.max() <= factor * (1 + 1e-9)


def test_the_norm_of_huge_numbers_is_taken_in_double_precision() -> None:
    x = np.full(4, 1e38, np.float32)
    assert np.isfinite(through(ECQ(norm="l2"), x)).all()
    x = np.full(64, 1e38, np.float32)
    assert np.isnan(through(ECQ(norm="l2"), x)).all(), "8e38 is no float32"
    assert np.isfinite(through(ECQ(norm="linf"), x)).all()


def test_every_bucket_is_scaled_by_itself() -> None:
    x = np.concatenate([normal((64,), scale=1e-5), normal((64,), seed=2, scale=1e5)])
    scales, _ = quantize(ECQ(4, "linf", 64), x.shape, x, NoiseKey())
    expected = np.abs(x.reshape(2, 64)).max(axis=1) / np.float32(4)
    assert np.array_equal(scales, expected)
