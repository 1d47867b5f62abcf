"""The site builds without a warning, where Sphinx is installed (`make docs` installs it)."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.name)
def test_no_formula_goes_over_a_line(page: Path) -> None:
    """A line of it that begins with a minus is the item of a list, and the formula is none; no warning."""
    blocks = re.split(r"^ *```.*$", page.read_text(), flags=re.MULTILINE)
    for line in "".join(blocks[::2]).splitlines():
        assert re.sub(r"`[^`]*`|\$\$", "", line).count("$") % 2 == 0, line
