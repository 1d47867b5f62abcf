"""The command ``hvd-compress`` and its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from hvd_compress import __version__, doctor


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line, without the usage; subcommands use it, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; None means the arguments of the process.

    Without a command, it prints the help.
    """
    parser = _Parser(prog="hvd-compress", description="Gradient compression.")
    parser.add_argument("--version", action="version", version=f"hvd-compress {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor.add_to(commands)
    args = parser.parse_args(command_line)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
