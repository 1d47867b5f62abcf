"""Confidence intervals of a mean, and of a mean difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


def mean(numbers: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean of some numbers.

    Raises:
        ValueError: there are fewer than two numbers.
    """
    if len(numbers) < 2:
        raise ValueError(f"expected at least two numbers, got {len(numbers)}")
    from scipy.stats import t

    found = np.asarray(numbers, np.float64)
    error = float(found.std(ddof=1)) / math.sqrt(len(found))
    quantile = float(t.ppf((1 + confidence) / 2, len(found) - 1))
    return Interval(float(found.mean()), quantile * error)


def paired(treated: Sequence[float], control: Sequence[float]) -> Interval:
    """Student's 95% t interval of the mean of ``treated[i] - control[i]``.

    Raises:
        ValueError: the sequences differ in length, or are shorter than two.
    """
    if len(treated) != len(control) or len(treated) < 2:
        raise ValueError(f"expected at least two pairs, got {len(treated)} and {len(control)}")
    return mean(np.subtract(treated, control))
