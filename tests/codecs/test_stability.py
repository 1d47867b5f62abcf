"""ECQ-SGD's lemmas, as properties of the codec, of its residuals, and of matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ, Ternary, stability
from tests.codecs.cases import through

TRIES = settings(max_examples=60, deadline=None)
SAMPLES = 300


def vectors(count: int = 64) -> st.SearchStrategy[np.ndarray]:
    """Sparse, flat and skew vectors of one bucket, shape=(count,), float32, none of them zero."""

    def make(seed: int, power: float, kept: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(count)
        x = np.sign(x) * np.abs(x) ** power
        x[rng.permutation(count)[kept:]] = 0
        return x.astype(np.float32)

    return st.builds(make, st.integers(0, 10**6), st.floats(0, 4), st.integers(1, count))


def errors(codec: ECQ | Ternary, x: np.ndarray) -> np.ndarray:
    """Q(x) - x for many draws of the noise, shape=(SAMPLES, n), float64: a bucket each of one tensor."""
    sent = through(codec, np.tile(x, SAMPLES)).reshape(SAMPLES, -1)
    return sent.astype(np.float64) - x


@TRIES
@given(vectors(), st.integers(1, 16))
@example(np.ones(64, np.float32), 1)
def test_lemma_1(x: np.ndarray, levels: int) -> None:
    """No bias, and a variance below gamma, within five standard errors."""
    drawn = errors(ECQ(levels, "l2", 64), x)
    unit = float(np.linalg.norm(x)) / levels
    assert np.all(np.abs(drawn.mean(0)) <= 5 * 0.5 * unit / math.sqrt(SAMPLES) + 1e-6 * unit)
    squares = np.square(drawn).sum(1)
    bound = stability.variance_factor(64, levels) * float(np.square(x.astype(np.float64)).sum())
    assert squares.mean() <= bound + 5 * squares.std() / math.sqrt(SAMPLES) + 1e-6 * bound


def test_the_clipped_ternary_is_biased_and_the_other_is_not() -> None:
    x = np.where(np.arange(64) == 5, 8.0, 0.25).astype(np.float32)
    biased, plain = (errors(Ternary(64, clip), x).mean(0)[5] for clip in (1.0, None))
    assert biased < -6
    assert plain == pytest.approx(0, abs=1e-6)


coefficients = st.tuples(st.floats(0, 1), st.floats(1 / 16, 1))


@TRIES
@given(coefficients, st.floats(1e-3, 100))
def test_the_largest_alpha_is_where_growth_reaches_1(
    coefficients: tuple[float, float], gamma: float
) -> None:
    _, beta = coefficients
    bound = stability.largest_alpha(gamma, beta)
    assert math.isclose(stability.growth(bound, beta, gamma), 1, rel_tol=1e-9)
    assert (
        stability.growth(0.999 * bound, beta, gamma)
        < 1
        < stability.growth(1.001 * bound, beta, gamma)
    )
