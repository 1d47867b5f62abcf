"""What models train on: data that comes with a package, synthetic data, and data sets on disk."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import cifar10, digits, imagenet, mnist, mnist5k, synthetic, text
from benchmarks.data.samples import Data
from benchmarks.models import ModelSpec

__all__ = ["Data", "load", "read"]

_ON_DISK = (mnist, cifar10, imagenet)
_IN_PACKAGES = {"digits": digits, mnist5k.NAME: mnist5k}


def load(model: ModelSpec, choice: str | Path | None = None) -> Data:
    """A model's data.

    Args:
        model: what is trained.
        choice: as for :func:`read`; of text, a file or folder; None is the model's default.

    Raises:
        ValueError: the folder holds nothing that is known, or samples of another shape.
    """
    if model.data == "text":
        (context,) = model.input
        return text.load(context, None if choice is None else Path(choice))
    if choice is None and model.data == "synthetic":
        return synthetic.load(model.input, model.classes)
    data = read(choice or model.data, model.input)
    if data.image != model.input:
        raise ValueError(f"{data.name}: expected images of shape {model.input}, got {data.image}")
    return data


def read(choice: str | Path, image: tuple[int, ...]) -> Data:
    """Images, as near to a shape as the data set can be.

    Args:
        choice: ``"digits"``, ``"mnist5k"``, or a folder, whose format is told by its files.
        image: height, width and channels.

    Raises:
        ValueError: the folder holds nothing that is known.
    """
    if str(choice) in _IN_PACKAGES:
        return _IN_PACKAGES[str(choice)].load(image)
    path = Path(choice)
    for reader in _ON_DISK:
        if reader.found(path):
            return reader.load(path, image)
    names = " or ".join(_IN_PACKAGES)
    files = "; ".join(reader.EXPECTED for reader in _ON_DISK)
    raise ValueError(f"expected {names}, or a folder with one of: {files}; got {path}")
