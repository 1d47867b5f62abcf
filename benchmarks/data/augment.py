"""Small changes of training images, the same for every codec."""

from __future__ import annotations

import numpy as np


def crop(
    images: np.ndarray, size: tuple[int, ...], pixels: int, border: str, key: list[int]
) -> np.ndarray:
    """Puts a border around each image, and cuts a part out of it at random.

    Args:
        images: shape=(n, height, width, channels); any shape if nothing is to be cut.
        size: the height and width of the parts.
        pixels: the width of the border on each side. Images of that size move by this much at most.
        border: ``"edge"`` repeats the outermost pixels, ``"constant"`` is zeros.
        key: the seed of the random numbers.

    Returns:
        Shape=(n, *size, channels).

    Raises:
        ValueError: something other than images is to be moved.
    """
    if not pixels and images.shape[1:3] == size:
        return images
    _check(images)
    count, *sides, _ = images.shape
    room = np.array([side + 2 * pixels - part for side, part in zip(sides, size, strict=True)])
    down, right = np.random.default_rng(key).integers(0, room[:, None, None] + 1, (2, count, 1))
    around = ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0))
    padded = np.pad(images, around, mode=border)  # type: ignore[call-overload]
    rows = (down + np.arange(size[0]))[:, :, None]
    columns = (right + np.arange(size[1]))[:, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]


def middle(images: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The middle of each image, shape=(n, *size, channels); images of that size stay."""
    if images.shape[1:3] == size:
        return images
    top, left = ((side - part) // 2 for side, part in zip(images.shape[1:3], size, strict=True))
    return images[:, top : top + size[0], left : left + size[1]]


def mirror(images: np.ndarray, share: float, key: list[int]) -> np.ndarray:
    """Mirrors a share of the images, chosen at random, left to right.

    Raises:
        ValueError: something other than images is to be mirrored.
    """
    if not share:
        return images
    _check(images)
    chosen = np.random.default_rng(key).random(len(images)) < share
    return np.where(chosen[:, None, None, None], images[:, :, ::-1], images)


def _check(images: np.ndarray) -> None:
    if images.ndim != 4:
        raise ValueError(f"expected images to shift, got samples of shape {images.shape[1:]}")
