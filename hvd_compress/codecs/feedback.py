"""Error feedback, the same step around every codec.

With residual ``h`` and gradient ``g``, encode ``x = g + alpha h`` and keep
``h <- beta h + g - decode(encode(x))`` (ECQ-SGD, equations 6 and 7). 1-bit SGD has
alpha = beta = 1 (section 3); QSGD and TernGrad have alpha = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hvd_compress.codecs import bfloat
from hvd_compress.codecs.checks import check_choice, check_number, store
from hvd_compress.codecs.noise import NoiseKey, rounding


@dataclass(frozen=True)
class ErrorFeedback:
    """The coefficients of the fused feedback step; alpha = 0 switches it off.

    Attributes:
        alpha: the compensation coefficient, 0 <= alpha <= 1 (ECQ-SGD, equation 7).
        beta: the time decay of the residual, 0 <= beta <= 1 (ECQ-SGD, equation 5).
        residual_dtype: the dtype in which residuals are kept. ``"bfloat16"`` halves their memory; each new
            residual is then rounded to one of its two neighbours, at random and without bias.
    """

    alpha: float = 1.0
    beta: float = 1.0
    residual_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_number("ErrorFeedback", "alpha", self.alpha, 0.0, 1.0)
        check_number("ErrorFeedback", "beta", self.beta, 0.0, 1.0)
        store(self, "alpha", float(self.alpha))
        store(self, "beta", float(self.beta))
        check_choice(
            "ErrorFeedback", "residual_dtype", self.residual_dtype, ("float32", "bfloat16")
        )

    @cached_property
    def enabled(self) -> bool:
        """Whether a residual is kept at all."""
        return self.alpha != 0

    def compensate(self, gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Computes x = g + alpha h in float32, with one multiplication, then one addition."""
        return gradient + np.float32(self.alpha) * residual

    def carry(
        self,
        gradient: np.ndarray,
        residual: np.ndarray,
        decoded: np.ndarray,
        noise: NoiseKey,
    ) -> np.ndarray:
        """Computes the new residual, (beta h + g) - decoded, in float32 and in that order.

        Where ``decoded`` is not finite, the residual stays as it was.

        Args:
            gradient: g, shape=(n,), float32.
            residual: h, shape=(n,), float32.
            decoded: the decoded payload, shape=(n,), float32.
            noise: the tensor's position in the noise, for the rounding to bfloat16.

        Returns:
            shape=(n,), float32; bfloat16 numbers if that is the :attr:`residual_dtype`.
        """
        kept = (np.float32(self.beta) * residual + gradient) - decoded
        kept = np.where(np.isfinite(decoded), kept, residual)
        if self.residual_dtype == "float32":
            return kept
        return bfloat.widened(bfloat.rounded(kept, rounding(kept.size, noise)))


OFF = ErrorFeedback(alpha=0.0)
"""No error feedback."""
