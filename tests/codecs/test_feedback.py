"""Stable coefficients of error feedback, as the check finds them and as long runs show them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hvd_compress.codecs import BF16, ECQ, Codec, ErrorFeedback, Int8, NoiseKey, OneBit, Ternary
from hvd_compress.codecs.int8 import Kind
from hvd_compress.kernels.reference import dequantize, quantize
from tests.codecs.cases import normal

D = 4096
QSGD = ECQ(4, "l2", "tensor")
UNBIASED = (QSGD, ECQ(), ECQ(127, "l2", 64), ECQ(1, "linf", 64), Ternary(), Ternary("tensor", None))
CONTRACTIVE = (OneBit(), OneBit("tensor"), Int8(), Int8("linear"), Int8("e5m2"), BF16())

Gradients = Callable[[int], np.ndarray]


def bound(codec: Codec, beta: float) -> float:
    """The largest alpha with alpha^2 gamma + (beta - alpha)^2 = 1, by bisection."""
    gamma = codec.variance_factor(D)
    low, high = beta / (gamma + 1), 2.0
    for _ in range(200):
        middle = (low + high) / 2
        inside = middle**2 * gamma + (beta - middle) ** 2 < 1
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
@pytest.mark.parametrize("beta", (1.0, 0.9, 0.5))
def test_unbiased_codecs_are_held_to_lemma_2(codec: Codec, beta: float) -> None:
    limit = bound(codec, beta)
    if beta == 1.0:
        assert limit == pytest.approx(2 / (codec.variance_factor(D) + 1))
    codec.check_feedback(ErrorFeedback(min(1.0, limit * 0.999), beta), (D,))
    if limit * 1.001 <= 1:
        with pytest.raises(ValueError, match=r"expected alpha < .*, got alpha = ") as raised:
            codec.check_feedback(ErrorFeedback(limit * 1.001, beta), (D,))
        assert f"{limit:.4g}" in str(raised.value)


def test_a_growth_of_exactly_1_is_refused() -> None:
    """The residual would not shrink; the next smaller compensation is accepted."""
    codec = ECQ(16, "l2", 2304)
    assert codec.variance_factor(D) == 3
    with pytest.raises(ValueError, match=r"expected alpha < 0\.5 .*, got alpha = 0\.5"):
        codec.check_feedback(ErrorFeedback(0.5, 1.0), (D,))
    codec.check_feedback(ErrorFeedback(0.5 - 1e-9, 1.0), (D,))


@pytest.mark.parametrize("codec", CONTRACTIVE, ids=str)
def test_contractive_codecs_take_alpha_up_to_beta(codec: Codec) -> None:
    for alpha, beta in ((1.0, 1.0), (0.9, 0.9), (0.1, 0.5)):
        codec.check_feedback(ErrorFeedback(alpha, beta), (D,))
    for alpha, beta in ((1.0, 0.999), (0.5, 0.1)):
        with pytest.raises(ValueError, match=r"expected alpha <= beta = .*, got alpha = "):
            codec.check_feedback(ErrorFeedback(alpha, beta), (D,))


@pytest.mark.parametrize("kind", ("static", "mantissa"))
def test_a_fixed_range_takes_no_feedback(kind: Kind) -> None:
    """Gradients just beyond the range: each step leaves as much behind as the one before."""
    codec, feedback = Int8(kind, offset=-2), ErrorFeedback(1.0, 1.0)
    with pytest.raises(ValueError, match=r"expected alpha = 0 for .*whose range is fixed"):
        codec.check_feedback(feedback, (D,))
    gradient = np.full(64, 0.02, np.float32)
    norms = largest_residual(codec, feedback, 400, lambda step: gradient)
    assert norms[-1] > 1.9 * norms[199] > 10


def test_the_bound_depends_on_the_tensor_and_not_only_on_the_codec() -> None:
    feedback = ErrorFeedback(0.3, 1.0)
    QSGD.check_feedback(feedback, (64,))
    with pytest.raises(ValueError, match="alpha"):
        QSGD.check_feedback(feedback, (4096,))
    ECQ(4, "l2", 64).check_feedback(feedback, (4096,))


def test_feedback_that_is_off_suits_every_codec() -> None:
    for codec in (*UNBIASED, *CONTRACTIVE):
        assert not ErrorFeedback(0.0).enabled
        codec.check_feedback(ErrorFeedback(0.0), (1 << 30,))
        codec.check_feedback(ErrorFeedback(0.0), (0,))


def largest_residual(
    codec: Codec, feedback: ErrorFeedback, steps: int, gradients: Gradients
) -> list[float]:
    """The residual's norm over the gradient's, after each step."""
    residual = np.zeros_like(gradients(0))
    shape = residual.shape
    norms = []
    for step in range(steps):
        g = gradients(step)
        x = feedback.compensate(g, residual)
        with np.errstate(all="ignore"):
            sent = dequantize(codec, shape, *quantize(codec, shape, x, NoiseKey(step=step)))
        residual = feedback.carry(g, residual, sent, NoiseKey(step=step))
        norms.append(float(np.linalg.norm(residual) / np.linalg.norm(g)))
    return norms


def changing(step: int) -> np.ndarray:
    return normal((D,), seed=step)


def constant(step: int) -> np.ndarray:
    return normal((256,))


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
@pytest.mark.parametrize("beta", (1.0, 0.9))
def test_residuals_stay_bounded_just_inside_the_bound(codec: Codec, beta: float) -> None:
    alpha = min(1.0, 0.98 * bound(codec, beta))
    feedback = ErrorFeedback(alpha, beta)
    codec.check_feedback(feedback, (D,))
    gamma = codec.variance_factor(D)
    growth = alpha**2 * gamma + (beta - alpha) ** 2
    # With new gradients each step, E|h'|^2 <= growth E|h|^2 + gamma |g|^2. A clipping codec's error
    # has a part of at most |g| besides, and its expectation adds up over 1 / alpha steps.
    steady = math.sqrt(gamma / (1 - growth))
    clipping = 1 / alpha if isinstance(codec, Ternary) and codec.clip else 0.0
    norms = largest_residual(codec, feedback, 250, changing)
    assert max(norms) <= 2 * (steady + clipping)


@pytest.mark.parametrize("codec", CONTRACTIVE, ids=str)
@pytest.mark.parametrize("gradients", (changing, constant))
def test_residuals_of_contractive_codecs_stay_bounded(codec: Codec, gradients: Gradients) -> None:
    for feedback in (ErrorFeedback(1.0, 1.0), ErrorFeedback(0.5, 0.5)):
        # The same gradient again and again is the worst: 1-bit lets its largest elements wait for
        # hundreds of steps, the longer the larger the group, and only then sends them.
        steps = 1500 if gradients is constant else 200
        norms = largest_residual(codec, feedback, steps, gradients)
        assert max(norms[steps // 2 :]) <= 1.1 * max(norms[: steps // 2]), "no growth at length"


def test_qsgd_with_full_feedback_blows_up() -> None:
    """Variance factor 16 and alpha = 1: what the check is there to refuse."""
    feedback = ErrorFeedback(1.0, 1.0)
    with pytest.raises(ValueError, match="alpha"):
        QSGD.check_feedback(feedback, (D,))
    norms = largest_residual(QSGD, feedback, 100, changing)
    assert norms[-1] > 1e4
    inside = ErrorFeedback(0.98 * bound(QSGD, 1.0), 1.0)
    assert max(largest_residual(QSGD, inside, 100, changing)) < 1e3


def test_the_static_trees_lack_of_a_zero_stays_small() -> None:
    """Zeros are sent as its smallest magnitude, which feedback takes back in the next step."""
    codec = Int8("static")
    norms = []
    residual = np.zeros(64, np.float32)
    zeros = np.zeros(64, np.float32)
    feedback = ErrorFeedback(1.0, 1.0)
    for _ in range(100):
        x = feedback.compensate(zeros, residual)
        sent = dequantize(codec, (64,), *quantize(codec, (64,), x, NoiseKey()))
        residual = feedback.carry(zeros, residual, sent, NoiseKey())
        norms.append(np.abs(residual).max())
    assert max(norms) < 1.3e-7
