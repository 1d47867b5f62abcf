"""ECQ-SGD's lemmas, as properties of residuals and of matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.papers import stability
from hvd_compress.codecs import ECQ, ErrorFeedback, NoiseKey
from hvd_compress.codecs import stability as conditions
from tests.codecs.cases import through
from tests.codecs.test_stability import TRIES, coefficients


@TRIES
@given(coefficients, st.floats(1e-3, 30), st.integers(0, 40))
def test_lemma_2_is_its_recursion(
    coefficients: tuple[float, float], gamma: float, step: int
) -> None:
    """E|h'|^2 = (beta - alpha)^2 E|h|^2 + E|eps|^2, and E|eps|^2 = gamma (B + alpha^2 E|h|^2)."""
    alpha, beta = coefficients
    residual = 0.0
    for _ in range(step):
        residual = (beta - alpha) ** 2 * residual + gamma * (1 + alpha**2 * residual)
    expected = gamma * (1 + alpha**2 * residual)
    assert math.isclose(stability.error_bound(alpha, beta, gamma, step), expected, rel_tol=1e-6)


@TRIES
@given(coefficients, st.floats(1e-3, 30), st.integers(0, 1000))
def test_equation_13_bounds_every_step(
    coefficients: tuple[float, float], gamma: float, step: int
) -> None:
    alpha, beta = coefficients
    assume(conditions.growth(alpha, beta, gamma) < 0.999)
    of_all = stability.error_bound(alpha, beta, gamma)
    assert gamma <= stability.error_bound(alpha, beta, gamma, step) <= of_all * (1 + 1e-9)
    assert math.isclose(stability.error_bound(alpha, beta, gamma, 100_000), of_all, rel_tol=1e-6)


def test_an_unstable_pair_has_no_bound_for_all_steps() -> None:
    assert stability.error_bound(0.15, 1.0, 16.0) == math.inf
    assert stability.error_bound(0.0, 1.0, 16.0) == 16.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.02, 0.9), st.floats(0.5, 1), st.integers(1, 6))
def test_lemma_2_holds_of_the_codec(seed: int, share: float, beta: float, levels: int) -> None:
    """Gradients that do not know the errors, alike in every step: the worst that the lemma allows."""
    codec = ECQ(levels, "l2", 64)
    gamma = codec.variance_factor(64)
    alpha = share * min(1.0, conditions.largest_alpha(gamma, beta))
    feedback = ErrorFeedback(alpha, beta)
    codec.check_feedback(feedback, (64,))
    g = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
    steps, runs = 12, 200
    # A bucket each of one tensor.
    everywhere = np.tile(g, runs)
    residual = np.zeros_like(everywhere)
    squares = np.empty((runs, steps))
    for step in range(steps):
        x = feedback.compensate(everywhere, residual)
        sent = through(codec, x, step=step)
        squares[:, step] = np.square((sent - x).astype(np.float64)).reshape(runs, -1).sum(1)
        residual = feedback.carry(everywhere, residual, sent, NoiseKey())
    bounds = [stability.error_bound(alpha, beta, gamma, step) for step in range(steps)]
    found = squares.mean(0) / float(np.square(g.astype(np.float64)).sum())
    margin = 5 * squares.std(0) / math.sqrt(runs) / float(np.square(g.astype(np.float64)).sum())
    assert np.all(found <= np.array(bounds) + margin)


@st.composite
def quadratics(draw: st.DrawFn) -> tuple[float, float, float, np.ndarray, int]:
    """alpha <= beta, the rate, a positive definite A with rate * largest eigenvalue <= 1, and a gap."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    size = draw(st.integers(1, 4))
    rate = draw(st.floats(0.01, 0.5))
    curvatures = rng.uniform(0.01, 1 / rate, size)
    turn = np.linalg.qr(rng.standard_normal((size, size)))[0]
    beta = draw(st.floats(0.1, 1))
    alpha = draw(st.floats(0, 1)) * beta
    return alpha, beta, rate, turn @ np.diag(curvatures) @ turn.T, draw(st.integers(0, 25))


@TRIES
@given(quadratics())
def test_an_error_reaches_the_model_as_the_multiplier_says(
    drawn: tuple[float, float, float, np.ndarray, int],
) -> None:
    """One error, once, in the updates of equations 6, 17 and 18: minus eta Theta after the gap."""
    alpha, beta, rate, a, gap = drawn
    w = -rate * np.eye(len(a))[0]
    residual = -np.eye(len(a))[0]
    for _ in range(gap):
        w = w - rate * (a @ w + alpha * residual)
        residual = (beta - alpha) * residual
    eigenvalues, turn = np.linalg.eigh(np.eye(len(a)) - rate * a)
    ours = [stability.error_multiplier(gap, alpha, beta, float(one)) for one in eigenvalues]
    expected = turn @ np.diag(ours) @ turn.T
    np.testing.assert_allclose(w, -rate * expected[0], atol=1e-9)


@TRIES
@given(quadratics())
def test_lemma_3(drawn: tuple[float, float, float, np.ndarray, int]) -> None:
    alpha, beta, rate, a, gap = drawn
    shrinkages = np.linalg.eigvalsh(np.eye(len(a)) - rate * a)
    largest = float(shrinkages.max())
    assume(largest > 1e-3)
    for one in shrinkages:
        ours = stability.error_multiplier(gap, alpha, beta, float(max(0, one)))
        bound = stability.multiplier_bound(gap, alpha, beta, float(max(0, one)), largest)
        assert ours <= bound + 1e-9


@TRIES
@given(st.floats(0, 0.99), st.floats(0.01, 0.99), st.integers(0, 30))
def test_lemma_3_with_its_beta(step: float, share: float, gap: int) -> None:
    largest = beta = stability.best_beta(step, 1.0)
    alpha = share * beta
    nu = (beta - alpha) / largest
    bound = stability.multiplier_bound(gap, alpha, beta, 0.5 * largest, largest)
    assert math.isclose(bound, (nu * 0.5 * largest) ** gap, rel_tol=1e-6, abs_tol=1e-12)


def test_lemma_3_needs_more_than_the_paper_asks_for() -> None:
    """eta a_1 < 1, but H has a negative eigenvalue: the multiplier is above the bound."""
    alpha, beta, largest, negative = 0.5, 1.0, 0.9, -0.9
    ours = stability.error_multiplier(1, alpha, beta, negative)
    assert ours == pytest.approx(-1.4)
    assert stability.multiplier_bound(1, alpha, beta, negative, largest) == pytest.approx(-0.4)
    ours = stability.error_multiplier(2, alpha, beta, negative)
    assert ours > stability.multiplier_bound(2, alpha, beta, negative, largest) + 0.5


@TRIES
@given(st.floats(0.001, 0.2), st.floats(0.05, 0.95), st.floats(0.1, 20))
def test_lemma_4(step: float, share: float, gamma: float) -> None:
    beta = stability.best_beta(step, 1.0)
    alpha = share * min(beta, conditions.largest_alpha(gamma, beta))
    assume(conditions.growth(alpha, beta, gamma) < 0.999)
    shrinkages = [beta, 0.7 * beta, 0.1]
    ratios = [
        stability.contribution_ratio(gap, alpha, beta, gamma, shrinkages) for gap in (100, 200, 400)
    ]
    # The largest eigenvalue decides: nu^n, squared.
    bound = stability.error_bound(alpha, beta, gamma) / gamma
    expected = [((beta - alpha) / beta) ** (2 * gap) * bound for gap in (100, 200, 400)]
    assert ratios == pytest.approx(expected, rel=1e-3, abs=1e-12)


def test_with_beta_1_the_ratio_does_not_vanish() -> None:
    alpha, gamma, step = 0.05, 16.0, 0.01
    ratio = stability.contribution_ratio(3000, alpha, 1.0, gamma, [1 - step])
    left = (step / (alpha - step)) ** 2
    assert ratio == pytest.approx(left * stability.error_bound(alpha, 1.0, gamma) / gamma, rel=1e-6)
