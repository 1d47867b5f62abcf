"""A folder of images in ImageNet's arrangement: ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.data.samples import Data

EXPECTED = "train/CLASS/*.jpg|jpeg|png and val/CLASS/... (ImageNet)"
_ENDINGS = {".jpg", ".jpeg", ".png"}
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
_CROP = 0.875
"""The side of a model's input, divided by the shorter side of the image: 224 / 256."""


def found(path: Path) -> bool:
    """Whether a folder has this arrangement."""
    return (path / "train").is_dir()


def load(path: Path, image: tuple[int, ...], margin: int = 0) -> Data:
    """The folder's images at the size that a model wants, and a margin around them; ``val`` may be missing.

    With a margin of 32 and a model that takes 224x224, the whole of an image's shorter side is there.
    """
    classes = sorted(entry.name for entry in (path / "train").iterdir() if entry.is_dir())
    train = FolderImages(path / "train", classes, image, margin)
    test = FolderImages(path / "val", classes, image, margin) if (path / "val").is_dir() else None
    return Data(path.name, len(classes), train, test)


class FolderImages:
    """Image files, read when they are asked for: scaled, and cut to the middle square."""

    def __init__(
        self, folder: Path, classes: list[str], image: tuple[int, ...], margin: int
    ) -> None:
        """Lists the files.

        Raises:
            ValueError: there is no image.
        """
        self._files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = sorted(f for f in (folder / name).glob("*") if f.suffix.lower() in _ENDINGS)
            self._files += found
            labels += [label] * len(found)
        if not labels:
            raise ValueError(f"{folder}: expected {EXPECTED}, got no image")
        self.labels = np.array(labels, np.int64)
        self._side, _, channels = image
        self._crop = min(1.0, _CROP * self._side / (self._side - margin))
        self._mode = "RGB" if channels == 3 else "L"

    def load(self, indices: np.ndarray) -> np.ndarray:
        """Images, shape=(len(indices), height, width, channels), dtype float32."""
        return np.stack([self._read(self._files[int(i)]) for i in indices])

    def _read(self, file: Path) -> np.ndarray:
        from PIL import Image

        with Image.open(file) as opened:
            picture = opened.convert(self._mode)
        crop = min(picture.size) * self._crop
        left, top = ((extent - crop) / 2 for extent in picture.size)
        picture = picture.resize(
            (self._side, self._side),
            Image.Resampling.BILINEAR,
            box=(left, top, left + crop, top + crop),
        )
        pixels = np.asarray(picture, np.float32).reshape(self._side, self._side, -1) / 255
        channels = pixels.shape[-1]
        return (pixels - _MEAN[:channels]) / _DEVIATION[:channels]
