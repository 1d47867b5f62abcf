"""Keeps libraries' start-up messages off the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def standard_error() -> Iterator[None]:
    """Drops the output to standard error, native code's included; shows it if an exception is raised."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            written.seek(0)
            os.write(terminal, written.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
