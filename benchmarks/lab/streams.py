"""Lines of several processes on one terminal, each with its rank before it."""

from __future__ import annotations

import re
from typing import BinaryIO

_LINE = re.compile(rb"([^\r\n]*)(\r\n?|\n)")
_LONGEST = 1 << 16


class Prefixed:
    """Writes whole lines as ``[rank]<stdout>:line``, the way ``horovodrun`` does.

    A carriage return ends a line that has any text: progress bars show up as they go.
    """

    def __init__(self, out: BinaryIO, rank: int, name: str) -> None:
        self._out = out
        self._prefix = f"[{rank}]<{name}>:".encode()
        self._rest = b""
        self._returned = False

    def write(self, data: bytes) -> None:
        """Takes output as it comes."""
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
        """Writes what is left without an end of line."""
        if self._rest:
            self._line(self._rest)
        self._rest = b""
        self._out.flush()

    def _line(self, line: bytes) -> None:
        self._out.write(self._prefix + line + b"\n")
