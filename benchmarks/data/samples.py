"""The interface of a data set to trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class Samples(Protocol):
    """Labelled images, or text whose labels are the next tokens, that can be read in any order."""

    labels: np.ndarray
    """The labels: of images, shape=(n,); of text, shape=(n, tokens); dtype int64 or uint8."""

    def load(self, indices: np.ndarray) -> np.ndarray:
        """The samples with the given indices, as a model takes them.

        Images, standardised: shape=(len(indices), height, width, channels), dtype float32. Text:
        tokens, shape=(len(indices), tokens), dtype int64.
        """
        ...


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        name: the name in tables and JSON.
        classes: the number of classes, or of different tokens.
        train: the samples to train on.
        test: the samples to test on; None where an accuracy would mean nothing.
    """

    name: str
    classes: int
    train: Samples
    test: Samples | None

    @property
    def image(self) -> tuple[int, ...]:
        """The shape of one training sample."""
        return self.train.load(np.arange(1)).shape[1:]


class ArrayImages:
    """Images that lie in memory as they were stored, and are standardised when they are read."""

    def __init__(
        self, pixels: np.ndarray, labels: np.ndarray, mean: ArrayLike, deviation: ArrayLike
    ) -> None:
        """Takes pixels, shape=(n, height, width, channels), and statistics that broadcast."""
        self.labels = labels.astype(np.int64)
        self._pixels = pixels
        self._mean = np.asarray(mean, np.float32)
        self._scale = np.float32(1) / np.asarray(deviation, np.float32)

    def load(self, indices: np.ndarray) -> np.ndarray:
        """Standardised images, shape=(len(indices), height, width, channels), dtype float32."""
        return (self._pixels[indices].astype(np.float32) - self._mean) * self._scale
