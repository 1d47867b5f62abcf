"""The bounds that ECQ-SGD's paper proves of error feedback (Wu et al., 2018, section 5), as functions.

The paper's letters are those of :mod:`hvd_compress.codecs.stability`; ``B`` bounds the squared norm of
gradients. For a quadratic objective with the matrix ``A``, a step of rate ``eta`` shrinks the distance to
the optimum by ``H = I - eta A``. The smallest eigenvalue of ``A`` is ``a_1``. Functions that take a
``shrinkage`` take one eigenvalue ``1 - eta a`` of ``H``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_compress.codecs.stability import growth


def error_bound(alpha: float, beta: float, gamma: float, step: int | None = None) -> float:
    """The bound of ``E |epsilon|^2``, a message's squared error, divided by B (lemma 2, equation 12).

    The paper leaves out a mixed term, ``2 alpha g h``. Its expectation is zero if gradients do not
    depend on past errors: the codec is unbiased, and so ``E h = 0``.

    Args:
        alpha: the compensation coefficient.
        beta: the time decay.
        gamma: the variance factor.
        step: the number of earlier messages, the paper's ``t``; None gives the bound for all steps,
            equation 13, which is infinite unless :func:`growth` is below 1.

    Returns:
        ``(1 + alpha^2 gamma (1 - lambda^t) / (1 - lambda)) gamma``; for QSGD, ``gamma``.
    """
    ratio = growth(alpha, beta, gamma)
    if alpha == 0:
        return gamma
    limit = 1 / (1 - ratio) if ratio < 1 else math.inf
    total = limit if step is None else _geometric(ratio, step)
    return (1 + alpha**2 * gamma * total) * gamma


def best_beta(rate: float, curvature: float) -> float:
    """The beta for which section 5.2 shows an advantage over QSGD, ``1 - eta a_1``.

    Args:
        rate: the learning rate, ``eta``.
        curvature: the smallest curvature of the objective, ``a_1``.

    Raises:
        ValueError: ``eta a_1`` is not in [0, 1), as lemma 3 requires.
    """
    if not 0 <= rate * curvature < 1:
        raise ValueError(
            f"best_beta: expected 0 <= rate * curvature < 1 (ECQ-SGD, lemma 3), got {rate * curvature}"
        )
    return 1 - rate * curvature


def error_multiplier(gap: int, alpha: float, beta: float, shrinkage: float) -> float:
    """The factor of a message's error in the model ``gap`` steps later (equation 22).

    ``Theta = h^n - sum for k = 1 to n of alpha (beta - alpha)^(k - 1) h^(n - k)``. For QSGD, ``h^n``.

    Args:
        gap: the number of steps, ``n``, the paper's ``t - t'``.
        alpha: the compensation coefficient.
        beta: the time decay.
        shrinkage: an eigenvalue of ``H``, the formula's ``h``.
    """
    sent_later = sum(alpha * (beta - alpha) ** k * shrinkage ** (gap - 1 - k) for k in range(gap))
    return shrinkage**gap - sent_later


def multiplier_bound(
    gap: int, alpha: float, beta: float, shrinkage: float, largest: float
) -> float:
    """The upper bound of :func:`error_multiplier` (lemma 3, equation 23).

    ``(1 - alpha / h_1 (1 - nu^n) / (1 - nu)) h^n`` with ``nu = (beta - alpha) / h_1``. With
    :func:`best_beta` that is ``nu^n h^n``. The lemma needs more than the paper says: ``alpha <= beta``, and
    no negative eigenvalue of ``H``, so that ``eta`` times the largest curvature is at most 1, too.

    Args:
        gap: the number of steps, ``n``.
        alpha: the compensation coefficient, at most beta.
        beta: the time decay.
        shrinkage: an eigenvalue of ``H``, the formula's ``h``, from 0 to ``largest``.
        largest: the largest eigenvalue of ``H``, ``h_1 = 1 - eta a_1``.
    """
    nu = (beta - alpha) / largest
    return (1 - alpha / largest * _geometric(nu, gap)) * shrinkage**gap


def contribution_ratio(
    gap: int, alpha: float, beta: float, gamma: float, shrinkages: Sequence[float]
) -> float:
    """An error's contribution to the bound of theorem 1, divided by the same for QSGD (lemma 4).

    The ratio is ``tau / tau_QSGD`` (equations 24 and 25), with lemma 2's bound for all steps. As ``gap``
    grows, the ratio tends to 0 if ``beta = 1 - eta a_1``, ``alpha > 0`` and ``growth < 1``. With
    ``beta = 1``, which the paper considers close enough, and ``alpha > eta a_1``, the ratio tends to
    ``(eta a_1 / (alpha - eta a_1))^2 / gamma`` times :func:`error_bound`.

    Args:
        gap: the number of steps since the error was made, ``n``.
        alpha: the compensation coefficient.
        beta: the time decay.
        gamma: the variance factor, > 0.
        shrinkages: the eigenvalues of ``H``.
    """
    ours = max(error_multiplier(gap, alpha, beta, h) ** 2 for h in shrinkages)
    without = max(h ** (2 * gap) for h in shrinkages)
    return ours * error_bound(alpha, beta, gamma) / (without * gamma)


def _geometric(ratio: float, terms: int) -> float:
    """The sum of ``ratio^k`` for k from 0 to ``terms - 1``."""
    if math.isclose(ratio, 1.0, rel_tol=1e-6):
        # The quotient would consist of rounding errors.
        return sum(ratio**k for k in range(terms))
    return (1 - ratio**terms) / (1 - ratio)
