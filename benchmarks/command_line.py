"""The parser and the argument types of the benchmarks' command lines."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import NoReturn

from benchmarks.compressions import AUTO, LOCAL, POWERSGD_HOOK, STOCK
from hvd_compress.codecs import codec_names

OTHERS = (AUTO, LOCAL, STOCK, POWERSGD_HOOK)


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line, without the long usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")


def positive(text: str) -> int:
    """Reads a positive integer, as an argument type."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def share(text: str) -> float:
    """A type of arguments: numbers from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def compression(text: str) -> str:
    """Checks the name in ``NAME`` or ``NAME:key=value,...``, as an argument type; settings come later."""
    name = text.partition(":")[0]
    names = (*codec_names(), *OTHERS)
    if name not in names:
        nearest = get_close_matches(name, names, 1)
        hint = f" ({nearest[0]}?)" if nearest else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}{hint}")
    return text
