"""Docstrings begin with a noun or a verb, and not with the rest of a sentence; so do their descriptions."""

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
    assert found > 4000 and not wrong, "\n".join(wrong)
