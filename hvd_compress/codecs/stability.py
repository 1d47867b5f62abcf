"""The conditions under which error feedback is stable (ECQ-SGD, Wu et al., 2018, section 5).

The paper's letters: ``gamma`` is a codec's variance factor (:meth:`Codec.variance_factor`), and ``alpha``
and ``beta`` are the coefficients of :class:`hvd_compress.codecs.ErrorFeedback`.
"""

from __future__ import annotations

import math


def variance_factor(count: int, levels: int) -> float:
    """The ``gamma`` of ``levels`` evenly spaced magnitudes up to the l2 norm (lemma 1).

    ``E |Q(v) - v|^2 <= gamma |v|^2`` for every ``v``, with ``gamma = min(d / s^2, sqrt(d) / s)``.

    Args:
        count: the number of elements that share a norm, the paper's ``d``.
        levels: the number of non-zero magnitudes, the paper's ``s``.
    """
    return min(count / levels**2, math.sqrt(count) / levels)


def growth(alpha: float, beta: float, gamma: float) -> float:
    """The growth of the residual, ``lambda = alpha^2 gamma + (beta - alpha)^2`` (lemma 2).

    At each step, the bound of ``E |h|^2``, the residual's squared norm, is multiplied by ``lambda``. If
    ``lambda`` is below 1, the residual is bounded.
    """
    return alpha**2 * gamma + (beta - alpha) ** 2


def largest_alpha(gamma: float, beta: float = 1.0) -> float:
    """The alpha below which :func:`growth` is below 1; ``2 / (gamma + 1)`` for ``beta = 1``.

    This is the larger root of ``(gamma + 1) alpha^2 - 2 beta alpha + beta^2 - 1 = 0`` (after lemma 2).
    """
    inside = beta**2 - (gamma + 1) * (beta**2 - 1)
    return (beta + math.sqrt(inside)) / (gamma + 1)
