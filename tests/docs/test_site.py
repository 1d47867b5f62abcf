"""Checks of the site that `make docs` does not make: formulas, and the version to cite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.name)
def test_no_formula_goes_over_a_line(page: Path) -> None:
    """A line of it that begins with a minus is the item of a list, and the formula is none; no warning."""
    # The fences of tabs have four backticks, and prose and blocks of code inside.
    text = re.sub(r"^````.*$", "", page.read_text(), flags=re.MULTILINE)
    blocks = re.split(r"^ *```.*$", text, flags=re.MULTILINE)
    for line in "".join(blocks[::2]).splitlines():
        assert re.sub(r"`[^`]*`|\$\$", "", line).count("$") % 2 == 0, line


def test_the_citation_is_of_this_version() -> None:
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {hvd_compress.__version__}\n" in cited
