"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    Attributes:
        header: the columns' headers.
        rows: the rows, each with as many cells as the header.
        left: the number of columns at the beginning that are aligned left; the others are aligned right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """The table for the terminal, with a rule below the header."""
        widths = [max(len(cell) for cell in column) for column in self._columns()]
        rule = ["-" * width for width in widths]
        lines = [self._aligned(line, widths) for line in (self.header, rule, *self.rows)]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rule = ["---"] * self.left + ["---:"] * (len(self.header) - self.left)
        lines = (self.header, rule, *self.rows)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _columns(self) -> list[tuple[str, ...]]:
        return list(zip(self.header, *self.rows, strict=True))

    def _aligned(self, line: Sequence[str], widths: Sequence[int]) -> list[str]:
        return [
            cell.ljust(width) if i < self.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]


def si_bytes(count: float) -> str:
    """Bytes with three digits and a decimal prefix, such as ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
