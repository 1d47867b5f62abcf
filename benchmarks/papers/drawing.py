"""Small pictures, as SVG with text that stays text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.predict.plots import pyplot


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Axes to draw into, shape=(rows, columns); the file is written when the block ends."""
    plt = pyplot()
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "hvd_compress", "font.size": 9}
    style["path.simplify_threshold"] = 0.5
    size = options.pop("size", (3.4 * columns, 2.6 * rows))
    with plt.rc_context(style):
        drawn, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **options
        )
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date, the same results are the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        drawn.savefig(path, metadata=metadata)
        plt.close(drawn)
