"""Docstrings of tests begin with a noun or a verb, and not with the rest of a sentence."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent
DANGLING = {"Has", "Lets", "Of", "That", "What", "Which", "Whose"}


def _docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """The lines and texts of strings that stand alone, those that describe variables included."""
    alone = (one.value for one in ast.walk(tree) if isinstance(one, ast.Expr))
    texts = ((one.lineno, one.value) for one in alone if isinstance(one, ast.Constant))
    return [(line, text) for line, text in texts if isinstance(text, str)]


def test_none_begins_with_a_word_that_leaves_the_noun_to_the_reader() -> None:
    found, wrong = 0, []
    for path in TESTS.rglob("*.py"):
        for line, text in _docstrings(ast.parse(path.read_text())):
            found += 1
            if text.split()[0] in DANGLING:
                wrong.append(f"{path.relative_to(TESTS)}:{line}: {text}")
    assert found > 1000 and not wrong, "\n".join(wrong)
