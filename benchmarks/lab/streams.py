"""Prints the lines of several processes to one terminal, with the rank before each line."""

from __future__ import annotations

import re
from typing import BinaryIO

_LINE = re.compile(rb"([^\r\n]*)(\r\n?|\n)")
_LONGEST = 1 << 16


class Prefixed:
    """Writes whole lines as ``[rank]<stdout>:line``, as ``horovodrun`` does.

    A carriage return ends a line with text, so that progress bars are shown at once.
    """

    def __init__(self, out: BinaryIO, rank: int, name: str) -> None:
        self._out = out
        self._prefix = f"[{rank}]<{name}>:".encode()
        self._rest = b""
        self._returned = False

    def write(self, data: bytes) -> None:
        """Takes a piece of output, and writes the lines that are complete."""
        self._rest += data
        end = 0
        for match in _LINE.finditer(self._rest):
            text, line_end = match.groups()
            if text or (line_end == b"\n" and not self._returned):
                self._line(text)
            self._returned = line_end == b"\r"
            end = match.end()
        self._rest = self._rest[end:]
        if len(self._rest) > _LONGEST:
            self.close()
        self._out.flush()

    def close(self) -> None:
        """Writes the rest of the output, which has no end of line."""
        if self._rest:
            self._line(self._rest)
        self._rest = b""
        self._out.flush()

    def _line(self, line: bytes) -> None:
        self._out.write(self._prefix + line + b"\n")
