"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import NoReturn

from benchmarks.compressions import AUTO, LOCAL, STOCK
from hvd_compress.codecs import codec_names

OTHERS = (AUTO, LOCAL, STOCK)


class Parser(argparse.ArgumentParser):
    """Answers wrong arguments in one line, without the usage, which is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")


def positive(text: str) -> int:
    """A type of arguments: integers from 1 on."""
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
    """A type of arguments: ``NAME`` or ``NAME:key=value,...``, whose settings are checked later."""
    name = text.partition(":")[0]
    names = (*codec_names(), *OTHERS)
    if name not in names:
        nearest = get_close_matches(name, names, 1)
        hint = f" ({nearest[0]}?)" if nearest else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}{hint}")
    return text
