"""Pictures of measurements; they need Matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ID = re.compile(r"\b([A-Za-z_]+)[0-9a-f]{10}\b")


def pyplot() -> Any:
    """The module ``matplotlib.pyplot``, set up to write files.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "expected Matplotlib to draw a picture, got none: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, *, font: int = 9, **options: Any
) -> Iterator[Any]:
    """Axes to draw into, shape=(rows, columns); the file is written when the block ends.

    Text in an SVG stays text, and the same results are the same file on every machine.

    Args:
        path: the file; its suffix determines the format.
        rows, columns: the number of axes.
        font: the size of text, in points.
        options: ``size`` in inches, and those of Matplotlib's ``subplots``.
    """
    plt = pyplot()
    svg = path.suffix == ".svg"
    size = options.pop("size", (3.4 * columns, 2.6 * rows))
    style: dict[Any, Any] = {"svg.fonttype": "none", "font.size": font}
    style["path.simplify_threshold"] = 0.5
    with plt.rc_context(style):
        drawn, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **options
        )
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=120, metadata={"Date": None} if svg else None)
        plt.close(drawn)
    if svg:
        path.write_text(_numbered(path.read_text()))


def _numbered(text: str) -> str:
    """An SVG whose names are counted: Matplotlib's are digests of numbers whose last bits differ."""
    numbers: dict[str, int] = {}
    return _ID.sub(lambda one: f"{one[1]}{numbers.setdefault(one[0], len(numbers))}", text)
