"""TernGrad's quantizer, beyond the contract (Wen et al., 2017, section 3)."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.codecs import NoiseKey, Ternary
from hvd_compress.kernels.reference import quantize
from tests.codecs.cases import encode, normal, through


def clipped(x: np.ndarray, c: float) -> np.ndarray:
    """Equation 21."""
    wide = x.astype(np.float64)
    limit = c * wide.std()
    return np.where(np.abs(wide) <= limit, wide, np.sign(wide) * limit)


@pytest.mark.parametrize("c", (1.0, 2.5))
@pytest.mark.parametrize("mean", (0.0, 0.3))
def test_clipping_is_equation_21(c: float, mean: float) -> None:
    x = normal((20_000,), seed=2, scale=0.5) + np.float32(mean)
    scales, _ = quantize(Ternary("tensor", clip=c), x.shape, x, NoiseKey())
    expected = clipped(x, c)
    assert scales[0] == pytest.approx(np.abs(expected).max(), rel=1e-6)
    assert scales[0] < np.abs(x).max()

    # E[Q(x)] is the clipped gradient: per sign of the excess, over the elements that are clipped.
    steps = 50
    sums = np.zeros(x.size)
    for step in range(steps):
        sums += through(Ternary("tensor", clip=c), x, step=step)
    cut = np.abs(x) > c * x.std(dtype=np.float64)
    np.testing.assert_allclose(sums[cut] / steps, expected[cut], rtol=1e-5)
    error = (sums / steps - expected)[~cut]
    deviation = np.sqrt(np.sum(np.abs(expected[~cut]) * (scales[0] - np.abs(expected[~cut]))))
    assert abs(error.sum()) <= 5 * deviation / np.sqrt(steps)


def test_gaussian_gradients_keep_their_length_and_direction() -> None:
    """Section 3.3: clipping at 2.5 changes the length by 1.0-1.5% and the direction by 2-3 degrees.

    For a normal distribution both can be computed: 0.93% and 1.94 degrees.
    """
    x = normal((100_000,), seed=3).astype(np.float64)
    (limit,), _ = quantize(Ternary("tensor"), x.shape, x.astype(np.float32), NoiseKey())
    y = np.clip(x, -limit, limit)
    shorter = 1 - np.linalg.norm(y) / np.linalg.norm(x)
    angle = np.degrees(np.arccos(x @ y / np.linalg.norm(x) / np.linalg.norm(y)))
    assert 0.008 <= shorter <= 0.015
    assert 1.8 <= angle <= 3.0


def test_without_clipping_the_scale_is_the_largest_magnitude() -> None:
    x = np.array([0.5, -4.0, 1.0], np.float32)
    scales, _ = quantize(Ternary(clip=None), x.shape, x, NoiseKey())
    assert scales.tolist() == [4.0]
    for step in range(20):
        decoded = through(Ternary(clip=None), x, step=step)
        assert decoded[1] == -4.0
        assert set(np.abs(decoded)) <= {0.0, 4.0}


def test_every_bucket_has_a_scale() -> None:
    x = np.repeat(np.array([1, 2, 3], np.float32), 64)[:150]
    scales, _ = quantize(Ternary(64, clip=None), x.shape, x, NoiseKey())
    assert scales.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", (0.1, -3.7, 1e-30, 1e30))
def test_a_constant_bucket_is_not_erased(value: float) -> None:
    x = np.full(1000, value, np.float32)
    assert np.array_equal(through(Ternary("tensor"), x), x)


def test_a_spike_is_clipped_as_the_paper_says() -> None:
    x = np.zeros(2048, np.float32)
    x[7] = 1.0
    scales, _ = quantize(Ternary(), x.shape, x, NoiseKey())
    assert scales[0] == pytest.approx(2.5 * x.astype(np.float64).std(), rel=1e-6)


def test_probabilities_are_those_of_equation_3() -> None:
    """Among n draws with probability p, the count is within 5 sqrt(n p (1 - p)) of n p."""
    count = 400_000
    x = np.full(count, 0.25, np.float32)
    x[0] = 1.0
    taken = np.count_nonzero(through(Ternary("tensor", clip=None), x)[1:])
    assert abs(taken - 0.25 * count) <= 5 * np.sqrt(count * 0.25 * 0.75)


def test_bits_of_large_tensors() -> None:
    for codec in (Ternary(), Ternary("tensor")):
        assert codec.bits_per_element((4096, 9216)) <= 1.7


def test_equal_settings_have_equal_bytes_however_they_are_written() -> None:
    x = normal((100,))
    ways = (Ternary(clip=2), Ternary(clip=2.0), Ternary(clip=np.float32(2)))  # type: ignore[arg-type]
    assert len({encode(codec, (100,), x).tobytes() for codec in ways}) == 1
