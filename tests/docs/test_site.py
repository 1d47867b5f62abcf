"""The site builds without a warning, where Sphinx is installed (`make docs` installs it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_site_builds(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "format.html").exists()
    assert len(list((tmp_path / "_images").glob("perfmodel-*.svg"))) == 3


def test_the_plot_of_page_one_is_of_the_records() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import plot_step_times
    finally:
        sys.path.pop(0)
    drawn = (ROOT / "docs" / "images" / "step_times.svg").read_text()
    for record in plot_step_times.RECORDS.values():
        for name, value in plot_step_times.seconds(record).items():
            assert f">{value:.2f} s<" in drawn, (record, name)
