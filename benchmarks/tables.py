"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells that are text already.

    Attributes:
        header: of the columns.
        rows: as many cells each.
        left: how many columns at the beginning are aligned left; the others are aligned right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """Columns with a rule below the header."""
        widths = [max(len(cell) for cell in column) for column in self._columns()]
        rule = ["-" * width for width in widths]
        lines = [self._aligned(line, widths) for line in (self.header, rule, *self.rows)]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def markdown(self) -> str:
        """GitHub's pipe table."""
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
    """``1.23 MB``: bytes in powers of a thousand, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
