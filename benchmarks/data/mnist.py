"""MNIST's IDX files (http://yann.lecun.com/exdb/mnist), as they are or compressed with gzip."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from benchmarks.data.samples import ArrayImages, Data

EXPECTED = "train-images-idx3-ubyte[.gz] (MNIST)"
SIDE = 28
_UNSIGNED_BYTES = 8
_MEAN, _DEVIATION = 33.318, 78.567


def found(path: Path) -> bool:
    """Whether a folder holds MNIST."""
    return _file(path, "train-images") is not None


def load(path: Path, image: tuple[int, ...], margin: int = 0) -> Data:
    """Loads MNIST.

    Args:
        path: the folder.
        image: the height, width and channels of a model's input. A larger one gets a black border; all
            channels are alike; images are never made smaller.
        margin: ignored: the border is part of ``image``.
    """
    return Data("mnist", 10, _part(path, "train", image), _part(path, "t10k", image))


def standardised(pixels: np.ndarray, labels: np.ndarray, image: tuple[int, ...]) -> ArrayImages:
    """Images of MNIST, shape=(n, 28, 28), dtype uint8, at a model's size."""
    height, width, channels = image
    border = [((side - SIDE) // 2, (side - SIDE + 1) // 2) for side in (height, width)]
    if min(height, width) > SIDE:
        pixels = np.pad(pixels, [(0, 0), *border])
    return ArrayImages(np.repeat(pixels[..., None], channels, -1), labels, _MEAN, _DEVIATION)


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes from an IDX file.

    Raises:
        ValueError: not such a file, or one that was cut off.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected an IDX file in a gzip: {error}") from error
    if len(raw) < 4 or raw[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise ValueError(f"{path}: expected an IDX file of unsigned bytes, got {raw[:4]!r}")
    dimensions = raw[3]
    data = 4 + 4 * dimensions
    shape = tuple(np.frombuffer(raw[4:data], ">u4").astype(int))
    count = int(np.prod(shape))
    if len(shape) != dimensions or len(raw) != data + count:
        raise ValueError(f"{path}: expected {count} bytes of shape {shape}, got {len(raw) - data}")
    return np.frombuffer(raw, np.uint8, offset=data).reshape(shape)


def _part(path: Path, prefix: str, image: tuple[int, ...]) -> ArrayImages:
    files = [_file(path, f"{prefix}-{what}") for what in ("images", "labels")]
    if None in files:
        raise ValueError(f"{path}: expected MNIST's {prefix}-images and {prefix}-labels")
    pixels, labels = (read_idx(file) for file in files if file)
    if len(pixels) != len(labels):
        raise ValueError(f"{path}: expected a label an image, got {len(pixels)}, {len(labels)}")
    return standardised(pixels, labels, image)


def _file(path: Path, prefix: str) -> Path | None:
    """The file of that prefix; both ``-idx3-ubyte`` and ``.idx3-ubyte`` are about."""
    return next(iter(sorted(path.glob(f"{prefix}[-.]idx[13]-ubyte*"))), None)
