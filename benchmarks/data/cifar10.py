"""CIFAR-10's Python version (Krizhevsky, 2009): pickled batches of 10,000 images."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.samples import ArrayImages, Data

EXPECTED = "data_batch_1 (CIFAR-10, Python version)"
_MEAN = np.array([125.3, 123.0, 113.9], np.float32)
_DEVIATION = np.array([63.0, 62.1, 66.7], np.float32)
_UNREADABLE = (
    *(pickle.UnpicklingError, OSError, EOFError),
    *(AttributeError, IndexError, KeyError, TypeError, ValueError),
)
"""The errors that a missing file, or bytes that are no such pickle, raise."""
_ARRAYS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def found(path: Path) -> bool:
    """Whether a folder holds CIFAR-10."""
    return (path / "data_batch_1").is_file()


def load(path: Path, image: tuple[int, ...], margin: int = 0) -> Data:
    """Loads CIFAR-10, 32x32x3, whatever shape is asked for."""
    train = _part(sorted(path.glob("data_batch_*")))
    return Data("cifar10", 10, train, _part([path / "test_batch"]))


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, shape=(n, 32, 32, 3), dtype uint8, and labels, shape=(n,), of one file.

    Raises:
        ValueError: the pickle holds something else than a batch of images.
    """
    try:
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"])
        pixels = pixels.reshape(len(labels), 3, 32, 32)
    except _UNREADABLE as error:
        raise ValueError(f"{path}: expected a batch of CIFAR-10 images: {error}") from error
    return pixels.transpose(0, 2, 3, 1), labels


def _part(files: list[Path]) -> ArrayImages:
    pixels, labels = zip(*(read_batch(file) for file in files), strict=True)
    return ArrayImages(np.concatenate(pixels), np.concatenate(labels), _MEAN, _DEVIATION)


class _Unpickler(pickle.Unpickler):
    """An unpickler for arrays alone, because a pickle from elsewhere could name any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
