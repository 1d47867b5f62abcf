"""What models train on: data that comes with a package, synthetic data, and data sets on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.data import cifar10, digits, imagenet, mnist, synthetic, text
from benchmarks.data.samples import Data
from benchmarks.models import ModelSpec

__all__ = ["Data", "load"]

_ON_DISK = (mnist, cifar10, imagenet)


def load(model: ModelSpec, path: Path | None = None) -> Data:
    """The data set in a folder, whose format is told by its files, or the model's default one.

    Raises:
        ValueError: the folder holds nothing that is known, or samples of another shape.
    """
    if model.data == "text":
        (context,) = model.input
        return text.load(context, path)
    if path is not None:
        data = _from_disk(path, model.input)
    elif model.data == "digits":
        data = digits.load()
    else:
        data = synthetic.load(model.input, model.classes)
    got = data.train.load(np.arange(1)).shape[1:]
    if got != model.input:
        raise ValueError(f"{data.name}: expected images of shape {model.input}, got {got}")
    return data


def _from_disk(path: Path, image: tuple[int, ...]) -> Data:
    for reader in _ON_DISK:
        if reader.found(path):
            return reader.load(path, image)
    expected = "; ".join(reader.EXPECTED for reader in _ON_DISK)
    raise ValueError(f"expected a folder with one of: {expected}; got {path}")
