"""Seconds, processor seconds and error of one float32 all-reduce between the hosts of a lab.

``sudo python -m benchmarks.allreduce --json build/allreduce.json`` measures every combination of hosts,
rates and round trips that the file lacks. Each method's rounds come in turns. Started again, it goes on
where it stopped, and draws the picture anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import json_files, launch, machine
from benchmarks.allreduce.drawing import costs, draw, table
from benchmarks.allreduce.rank import METHODS
from benchmarks.command_line import Parser, positive
from benchmarks.lab import rate

SCHEMA = "hvd_compress/allreduce/1"
LIBRARIES = ("bitsandbytes", "hivemind", "pypiquant")
_PLACE = ("hosts", "rate", "rtt", "bytes")


def main(command_line: list[str] | None = None) -> int:
    """Measures, writes the record and its picture, and prints the table."""
    args = _parse(command_line)
    about = {
        "machine": machine.description(),
        "versions": {**machine.versions(), **machine.versions_of(*LIBRARIES)},
        "keep_windows": args.keep_windows,
    }
    cells: list[dict[str, Any]] = []
    try:
        if args.json.exists():
            cells = json_files.read(args.json, SCHEMA, lambda raw: _same(raw, about)["cells"])
        done = {tuple(cell[key] for key in _PLACE) for cell in cells}
        places = itertools.product(args.bytes, args.hosts, args.rtt, args.rate)
        for size, hosts, rtt, link in tqdm(list(places), unit="lab", disable=None):
            if (hosts, link, rtt, size) in done:
                continue
            rows = _measure(args, hosts, link, rtt, size)
            cells.append({"hosts": hosts, "rate": link, "rtt": rtt, "bytes": size, "rows": rows})
            record = {"schema": SCHEMA, **about, "cells": cells}
            json_files.replace(args.json, json.dumps(record, indent=1) + "\n")
    except (ValueError, launch.RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    picture = args.json.with_suffix(".svg")
    draw(cells, picture)
    for rtt in dict.fromkeys(cell["rtt"] for cell in cells):
        print(f"\nround trip {rtt}: seconds\n{table(cells, rtt).text()}")
    print(f"\n{costs(cells).text()}\n\nwritten to {args.json} and {picture}")
    return 0


def _same(raw: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    for what, now in about.items():
        if raw.get(what) != now:
            raise ValueError(
                f"its {what} is {raw.get(what)}, and this one's {now}: write another file"
            )
    return raw


def _measure(args: argparse.Namespace, hosts: int, link: str, rtt: str, size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        launch.lab(
            hosts,
            1,
            "benchmarks.allreduce.rank",
            [
                "--json",
                str(out),
                "--bytes",
                str(size),
                "--rounds",
                str(args.rounds),
                "--methods",
                *args.methods,
            ],
            *("--rate", link, "--rtt", rtt, *["--keep-windows"] * args.keep_windows),
        )
        return json.loads(out.read_text())


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.allreduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--hosts", type=positive, nargs="+", default=[2, 4, 8], metavar="N")
    add("--rate", type=_limit, nargs="+", default=["100mbit", "500mbit", "1gbit"], metavar="RATE")
    add("--rtt", nargs="+", default=["none", "40ms"], metavar="TIME")
    add("--keep-windows", action="store_true", help="see python -m benchmarks.lab --help")
    add("--bytes", type=positive, nargs="+", default=[1 << 26], metavar="N",
        help="of the float32 tensor, a power of two; default: 64 MiB")  # fmt: skip
    add("--rounds", type=positive, default=3, help="of each method; default: 3")
    add("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME",
        help=f"default: all of {', '.join(METHODS)}")  # fmt: skip
    return parser.parse_args(command_line)


def _limit(text: str) -> str:
    try:
        if rate.parse(text).bits is not None:
            return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    raise argparse.ArgumentTypeError(
        "expected a rate such as 1gbit: without a limit, there is no network"
    )


if __name__ == "__main__":
    sys.exit(main())
