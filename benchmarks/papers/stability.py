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
    """Lemma 2, equation 12: the bound of ``E |epsilon|^2``, the squared error of a message, by B.

    The paper leaves out a mixed term, ``2 alpha g h``. Its expectation is zero where gradients do not
    depend on past errors: the codec is unbiased, and so ``E h = 0``.

    Args:
        alpha: compensation coefficient.
        beta: time decay.
        gamma: variance factor.
        step: how many messages there were before, the paper's ``t``; None is the bound for all steps,
            equation 13, which is infinite where ``growth`` is not below 1.

    Returns:
        ``(1 + alpha^2 gamma (1 - lambda^t) / (1 - lambda)) gamma``. QSGD's is ``gamma``.
    """
    ratio = growth(alpha, beta, gamma)
    if alpha == 0:
        return gamma
    limit = 1 / (1 - ratio) if ratio < 1 else math.inf
    total = limit if step is None else _geometric(ratio, step)
    return (1 + alpha**2 * gamma * total) * gamma


def best_beta(rate: float, curvature: float) -> float:
    """The beta for which section 5.2 shows an advantage over QSGD: ``1 - eta a_1``.

    Args:
        rate: the learning rate, ``eta``.
        curvature: the objective's smallest, ``a_1``.

    Raises:
        ValueError: ``eta a_1`` is not in [0, 1), which lemma 3 asks for.
    """
    if not 0 <= rate * curvature < 1:
        raise ValueError(
            f"best_beta: expected 0 <= rate * curvature < 1 (ECQ-SGD, lemma 3), got {rate * curvature}"
        )
    return 1 - rate * curvature


def error_multiplier(gap: int, alpha: float, beta: float, shrinkage: float) -> float:
    """Equation 22: what the error of a message counts for in the model, ``gap`` steps later.

    ``Theta = h^n - sum for k = 1 to n of alpha (beta - alpha)^(k - 1) h^(n - k)``. QSGD's is ``h^n``.

    Args:
        gap: ``n``, the paper's ``t - t'``.
        alpha: compensation coefficient.
        beta: time decay.
        shrinkage: ``h``, an eigenvalue of ``H``.
    """
    sent_later = sum(alpha * (beta - alpha) ** k * shrinkage ** (gap - 1 - k) for k in range(gap))
    return shrinkage**gap - sent_later


def multiplier_bound(
    gap: int, alpha: float, beta: float, shrinkage: float, largest: float
) -> float:
    """Lemma 3, equation 23: what :func:`error_multiplier` is not above.

    ``(1 - alpha / h_1 (1 - nu^n) / (1 - nu)) h^n`` with ``nu = (beta - alpha) / h_1``. With
    :func:`best_beta` that is ``nu^n h^n``. The lemma needs more than the paper says: ``alpha <= beta``, and
    no negative eigenvalue of ``H``, so ``eta`` times the largest curvature has to be at most 1, too.

    Args:
        gap: ``n``.
        alpha: compensation coefficient, at most beta.
        beta: time decay.
        shrinkage: ``h``, an eigenvalue of ``H``, from 0 to ``largest``.
        largest: ``h_1 = 1 - eta a_1``, the largest eigenvalue of ``H``.
    """
    nu = (beta - alpha) / largest
    return (1 - alpha / largest * _geometric(nu, gap)) * shrinkage**gap


def contribution_ratio(
    gap: int, alpha: float, beta: float, gamma: float, shrinkages: Sequence[float]
) -> float:
    """Lemma 4: what an error contributes to the bound of theorem 1, as a multiple of what it does in QSGD.

    ``tau / tau_QSGD`` (equations 24 and 25), with lemma 2's bound for all steps. It goes to 0 as ``gap``
    grows where ``beta = 1 - eta a_1``, ``alpha > 0`` and ``growth < 1``. With ``beta = 1``, which the paper
    takes for near enough, it goes to ``(eta a_1 / (alpha - eta a_1))^2 / gamma`` times :func:`error_bound`,
    where ``alpha > eta a_1``.

    Args:
        gap: ``n``, how many steps ago the error was made.
        alpha: compensation coefficient.
        beta: time decay.
        gamma: variance factor, > 0.
        shrinkages: the eigenvalues of ``H``.
    """
    ours = max(error_multiplier(gap, alpha, beta, h) ** 2 for h in shrinkages)
    without = max(h ** (2 * gap) for h in shrinkages)
    return ours * error_bound(alpha, beta, gamma) / (without * gamma)


def _geometric(ratio: float, terms: int) -> float:
    """The sum of ``ratio^k`` for k from 0 to ``terms - 1``."""
    if math.isclose(ratio, 1.0, rel_tol=1e-6):
        # The quotient would be one of rounding errors.
        return sum(ratio**k for k in range(terms))
    return (1 - ratio**terms) / (1 - ratio)
