"""The conditions under which error feedback is stable (ECQ-SGD, Wu et al., 2018, section 5).

The paper's letters: ``gamma`` is a codec's variance factor (:meth:`Codec.variance_factor`), and ``alpha``
and ``beta`` are the coefficients of :class:`hvd_compress.codecs.ErrorFeedback`.
"""

from __future__ import annotations

import math


def variance_factor(count: int, levels: int) -> float:
    """Lemma 1: the ``gamma`` of ``levels`` evenly spaced magnitudes below the l2 norm.

    ``E |Q(v) - v|^2 <= gamma |v|^2`` for every ``v``, with ``gamma = min(d / s^2, sqrt(d) / s)``.

    Args:
        count: elements that share a norm, the paper's ``d``.
        levels: non-zero magnitudes, the paper's ``s``.
    """
    return min(count / levels**2, math.sqrt(count) / levels)


def growth(alpha: float, beta: float, gamma: float) -> float:
    """Lemma 2: ``lambda = alpha^2 gamma + (beta - alpha)^2``.

    The factor from step to step on the bound of ``E |h|^2``, the residual's squared norm. Below 1 the
    residual is bounded.
    """
    return alpha**2 * gamma + (beta - alpha) ** 2


def largest_alpha(gamma: float, beta: float = 1.0) -> float:
    """Below which alpha ``growth`` is below 1; ``2 / (gamma + 1)`` for ``beta = 1`` (below lemma 2).

    The larger root of ``(gamma + 1) alpha^2 - 2 beta alpha + beta^2 - 1 = 0``.
    """
    inside = beta**2 - (gamma + 1) * (beta**2 - 1)
    return (beta + math.sqrt(inside)) / (gamma + 1)
