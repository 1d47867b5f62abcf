"""Images of any shape without a download, for step times and not for accuracies."""

from __future__ import annotations

import numpy as np

from benchmarks.data.samples import Data

IMAGES = 8192
_PATTERN_SEED = 0


def load(image: tuple[int, ...], classes: int, count: int = IMAGES) -> Data:
    """A training set without a test set."""
    return Data("synthetic", classes, SyntheticImages(image, classes, count), None)


class SyntheticImages:
    """Normal noise over a faint pattern of the class; image ``i`` is always the same."""

    def __init__(self, image: tuple[int, ...], classes: int, count: int) -> None:
        self.labels = np.random.default_rng(_PATTERN_SEED).integers(0, classes, count)
        self._image = image

    def load(self, indices: np.ndarray) -> np.ndarray:
        """Images, shape=(len(indices), height, width, channels), or vectors, dtype float32."""
        return np.stack([self._make(int(i)) for i in indices])

    def _make(self, index: int) -> np.ndarray:
        noise = np.random.default_rng([1, index]).standard_normal(self._image, np.float32)
        label = int(self.labels[index])
        coarse = np.random.default_rng([2, label]).standard_normal((4, 4, 1), np.float32)
        height, width, _ = (*self._image, 1, 1)[:3]
        pattern = coarse.repeat(-(-height // 4), 0).repeat(-(-width // 4), 1)
        patterned = noise.reshape(height, width, -1) + np.float32(0.5) * pattern[:height, :width]
        return patterned.reshape(self._image)
