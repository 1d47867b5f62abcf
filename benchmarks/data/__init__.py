"""The data that models train on: from packages, synthetic, or data sets on disk."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import cifar10, digits, imagenet, mnist, mnist5k, synthetic, text
from benchmarks.data.samples import Data
from benchmarks.models import ModelSpec

__all__ = ["Data", "load", "read"]

_ON_DISK = (mnist, cifar10, imagenet)
_IN_PACKAGES = {"digits": digits, mnist5k.NAME: mnist5k}


def load(model: ModelSpec, choice: str | Path | None = None, margin: int = 0) -> Data:
    """A model's data.

    Args:
        model: the model to train.
        choice: the same as in :func:`read`; for text, a file or folder; None is the model's default.
        margin: the same as in :func:`read`.

    Returns:
        Samples of the model's shape, or larger images.

    Raises:
        ValueError: the folder holds no known data set, or samples of another shape.
    """
    if len(model.input) != 3 and margin:
        raise ValueError(f"expected images around which to leave a margin, got {model.input}")
    if model.data == "text":
        (context,) = model.input
        return text.load(context, None if choice is None else Path(choice))
    if choice is None and model.data == "synthetic":
        return synthetic.load(_enlarged(model.input, margin), model.classes)
    if len(model.input) != 3:
        raise ValueError(f"expected no data but noise for vectors of length {model.input[0]}")
    data = read(choice or model.data, model.input, margin)
    if data.image[2] != model.input[2] or min(data.image[:2]) < max(model.input[:2]):
        raise ValueError(f"{data.name}: expected images of shape {model.input}, got {data.image}")
    return data


def read(choice: str | Path, image: tuple[int, ...], margin: int = 0) -> Data:
    """Images, as near to a shape as the data set can be.

    Args:
        choice: ``"digits"``, ``"mnist5k"``, or a folder, whose format is told by its files.
        image: height, width and channels.
        margin: the number of pixels by which height and width are to be larger.

    Raises:
        ValueError: the folder holds no known data set.
    """
    larger = _enlarged(image, margin)
    if str(choice) in _IN_PACKAGES:
        return _IN_PACKAGES[str(choice)].load(larger)
    path = Path(choice)
    for reader in _ON_DISK:
        if reader.found(path):
            return reader.load(path, larger, margin)
    names = " or ".join(_IN_PACKAGES)
    files = "; ".join(reader.EXPECTED for reader in _ON_DISK)
    raise ValueError(f"expected {names}, or a folder with one of: {files}; got {path}")


def _enlarged(image: tuple[int, ...], margin: int) -> tuple[int, ...]:
    return tuple(side + margin for side in image[:2]) + image[2:] if margin else image
