"""``hvd-compress``: its commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvd_compress import doctor
from hvd_compress.perfmodel import predict


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs a command; its arguments are those of the process if none are given."""
    parser = argparse.ArgumentParser(prog="hvd-compress", description="Gradient compression.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (predict, doctor):
        command.add_to(commands)
    args = parser.parse_args(command_line)
    try:
        return args.run(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
