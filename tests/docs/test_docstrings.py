"""Docstrings, their descriptions and comments in C++ begin with a noun or a verb, as whole sentences do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
DANGLING = "Has|How|Lets|Of|That|What|Which|Who|Whose"
ALONE = re.compile(rf"(?:{DANGLING})\b")
DESCRIPTION = re.compile(rf"^ +\w+(?:, \w+)*: (?:{DANGLING})\b", re.MULTILINE | re.IGNORECASE)


def _docstrings(parent: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the lines and texts of strings that stand alone, those that describe variables included."""
    for one in ast.iter_child_nodes(parent):
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
            yield one.lineno, str(one.value.value)
        elif isinstance(one, ast.stmt):
            yield from _docstrings(one)


def test_none_begins_with_a_word_that_leaves_the_noun_to_the_reader() -> None:
    found, wrong = 0, []
    for folder in ("benchmarks", "hvd_compress", "scripts", "tests"):
        for path in (TOP / folder).rglob("*.py"):
            for line, text in _docstrings(ast.parse(path.read_text())):
                found += 1
                place = f"{path.relative_to(TOP)}:{line}"
                starts = [ALONE.match(text.lstrip()), *DESCRIPTION.finditer(text)]
                wrong += [f"{place}: {one.group()}" for one in starts if one]
    assert found and not wrong, "\n".join(wrong)


def test_comments_in_cpp() -> None:
    """The first line of each comment; code that stands in front of a comment is part of its sentence."""
    found, wrong = 0, []
    for folder in ("benchmarks", "hvd_compress", "tests"):
        paths = [
            one for one in (TOP / folder).rglob("*") if one.suffix in {".c", ".cc", ".cu", ".h"}
        ]
        for path in paths:
            before = ""
            for number, line in enumerate(path.read_text().splitlines(), 1):
                text = line.strip()
                if text.startswith("// ") and not before.startswith("//"):
                    found += 1
                    if ALONE.match(text[3:]):
                        wrong.append(f"{path.relative_to(TOP)}:{number}: {text}")
                before = text
    assert found and not wrong, "\n".join(wrong)
