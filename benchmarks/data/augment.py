"""Small changes of training images, the same for every codec."""

from __future__ import annotations

import numpy as np


def shift(images: np.ndarray, pixels: int, key: list[int]) -> np.ndarray:
    """Moves each image by up to ``pixels`` in each direction, at random.

    Args:
        images: shape=(n, height, width, channels).
        pixels: the longest way; 0 changes nothing.
        key: seeds the random numbers.

    Returns:
        Images of the same shape; what moves in repeats the edge.

    Raises:
        ValueError: something other than images is to be moved.
    """
    if not pixels:
        return images
    if images.ndim != 4:
        raise ValueError(f"expected images to shift, got samples of shape {images.shape[1:]}")
    count, height, width, _ = images.shape
    down, right = np.random.default_rng(key).integers(0, 2 * pixels + 1, (2, count, 1))
    border = ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0))
    padded = np.pad(images, border, mode="edge")
    rows = (down + np.arange(height))[:, :, None]
    columns = (right + np.arange(width))[:, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]
