"""bfloat16, which NumPy lacks: the upper halves of float32 numbers, as uint16."""

from __future__ import annotations

import numpy as np


def rounded(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Adds noise to the lower halves and drops them; a NaN stays one if its lower half is 0.

    Args:
        x: the numbers, shape=(n,), dtype float32.
        noise: integers below 2**16, shape=(n,), dtype uint32; if they are uniform random numbers, each
            number becomes one of its two neighbours, at random and without bias.

    Returns:
        shape=(n,), dtype uint16.
    """
    return ((x.view(np.uint32) + noise) >> np.uint32(16)).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """The same numbers as float32, exactly; shape=(n,)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
