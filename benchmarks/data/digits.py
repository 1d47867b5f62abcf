"""1,797 handwritten digits that come with scikit-learn (Alpaydin and Kaynak, 1998)."""

from __future__ import annotations

import numpy as np

from benchmarks.data.samples import ArrayImages, Data

TEST_IMAGES = 360


def load(image: tuple[int, ...] = (28, 28, 1)) -> Data:
    """The digits, enlarged from 8x8, in a split that never changes.

    Args:
        image: the height, the width, which is the same, and the channels, which are all alike.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    side, _, channels = image
    pixels = enlarge(digits.images / 16.0, side)[..., None].astype(np.float32)
    pixels = np.repeat(pixels, channels, axis=-1)
    train, test = train_test_split(
        np.arange(len(pixels)), test_size=TEST_IMAGES, stratify=digits.target, random_state=0
    )
    mean, deviation = pixels[train].mean(), pixels[train].std()
    parts = (ArrayImages(pixels[p], digits.target[p], mean, deviation) for p in (train, test))
    return Data("digits", 10, *parts)


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Bilinear interpolation of square images, shape=(n, s, s), to shape=(n, side, side).

    Pixels are areas: the middle of the first new pixel lies at half a new pixel, and beyond the
    middle of an outermost old pixel its value is kept.
    """
    old = images.shape[-1]
    position = np.clip((np.arange(side) + 0.5) * old / side - 0.5, 0, old - 1)
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(old)))
    return weights @ images @ weights.T
