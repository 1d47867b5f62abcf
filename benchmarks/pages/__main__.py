"""Renders the tables and pictures of measurements in docs/ from the committed records.

``python -m benchmarks.pages`` writes tables between ``<!-- table: NAME -->`` and ``<!-- end -->``, and
pictures into docs/images; with ``--check``, it writes nothing, names the files that differ, and fails if
there are any. The names are in :mod:`benchmarks.pages.registry`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.command_line import Parser
from benchmarks.json_files import replace
from benchmarks.pages.registry import PICTURES, TABLES

ROOT = Path(__file__).parent.parent.parent
_PLACE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """All pages of the documentation, and the README."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def rendered(text: str) -> str:
    """A page's text with its tables rendered from the records.

    Raises:
        ValueError: the page names an unknown table.
    """

    def table(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"expected one of {', '.join(TABLES)}, got a place for table {name}")
        return f"{name}{place[2]}{TABLES[name]().markdown()}\n"

    return _PLACE.sub(table, text)


def names(text: str) -> list[str]:
    """The names of a page's tables."""
    return [place[1] for place in _PLACE.finditer(text)]


def outdated() -> Iterator[tuple[Path, str]]:
    """The pages and pictures that differ from the records, each with its right content."""
    for page in pages():
        if (new := rendered(page.read_text())) != page.read_text():
            yield page, new
    with TemporaryDirectory() as folder:
        for name, draw in PICTURES.items():
            drawn, there = Path(folder) / name, ROOT / "docs" / "images" / name
            draw(drawn)
            if not there.exists() or drawn.read_text() != there.read_text():
                yield there, drawn.read_text()


def main(command_line: list[str] | None = None) -> int:
    """Writes the files that differ or, with ``--check``, prints their names."""
    parser = Parser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where one differs"
    )
    args = parser.parse_args(command_line)
    found = list(outdated())
    for path, new in found:
        print(f"{path.relative_to(ROOT)}: {'differs' if args.check else 'written'}")
        if not args.check:
            replace(path, new)
    return 1 if found and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
