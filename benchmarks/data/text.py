"""Bytes of text that every machine with Python has: the sources of its standard library."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

import numpy as np

from benchmarks.data.samples import Data

CLASSES = 256
EXPECTED = "a text file, or a folder of *.txt, *.md or *.py"
_SUFFIXES = {".txt", ".md", ".py"}
_TEST_EVERY = 20
"""One block of windows in this many is for testing."""
_BLOCK = 64
"""The number of neighbouring windows in a block, all for training or all for testing, so that little
training text is next to test text."""


def load(context: int, path: Path | None = None) -> Data:
    """Windows of ``context`` bytes each, shape=(n, context); a window's labels are its next bytes.

    One block of windows in twenty is for testing, the same ones always.

    Args:
        context: the bytes of a window.
        path: a text file, or a folder of them; None is Python's standard library, without its
            packages and tests.

    Raises:
        ValueError: there is no text, or too little.
    """
    folder = Path(sysconfig.get_path("stdlib")) if path is None else path
    files = [folder] if folder.is_file() else _files(folder, recursive=path is not None)
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    windows = max(0, len(text) - 1) // context
    if windows < _TEST_EVERY * _BLOCK:
        raise ValueError(
            f"expected {EXPECTED} with more than {_TEST_EVERY * _BLOCK * context} bytes, "
            f"got {len(text)} in {folder}"
        )
    all_windows = np.arange(windows)
    is_test = all_windows // _BLOCK % _TEST_EVERY == _TEST_EVERY - 1
    parts = (TextWindows(text, context, all_windows[which]) for which in (~is_test, is_test))
    name = f"python {platform.python_version()}" if path is None else path.name
    return Data(name, CLASSES, *parts)


class TextWindows:
    """Implements :class:`benchmarks.data.samples.Samples`.

    Args:
        text: shape=(bytes,), dtype uint8.
        context: the bytes of a window.
        windows: the numbers of the windows, shape=(n,), int64.
    """

    def __init__(self, text: np.ndarray, context: int, windows: np.ndarray) -> None:
        whole = (len(text) - 1) // context * context
        self._inputs = text[:whole].reshape(-1, context)[windows]
        self.labels = text[1 : whole + 1].reshape(-1, context)[windows]

    def load(self, indices: np.ndarray) -> np.ndarray:
        """Bytes, shape=(len(indices), context), dtype int64."""
        return self._inputs[indices].astype(np.int64)


def _files(folder: Path, *, recursive: bool) -> list[Path]:
    found = folder.rglob("*") if recursive else folder.glob("*")
    return sorted(file for file in found if file.suffix in _SUFFIXES and file.is_file())
