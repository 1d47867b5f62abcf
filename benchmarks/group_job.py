"""The command line and the main program of benchmarks on the ranks of a ``torch.distributed`` job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import json_files, machine
from benchmarks.command_line import Parser, positive
from benchmarks.tables import Table

Rows = list[dict[str, Any]]


def parser(module: str, description: str | None, *, batches: list[int]) -> Parser:
    """A parser with the options that these benchmarks share."""
    parser = Parser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="OUT")
    add(
        "--batch",
        type=positive,
        nargs="+",
        default=batches,
        metavar="N",
        help="samples in a minibatch of all ranks",
    )
    add("--width", type=positive, default=1024, help="units of each of three layers")
    add("--rounds", type=positive, default=8)
    add("--block", type=positive, default=4, help="minibatches of a choice in a round")
    add("--threads", type=positive, default=1)
    return parser


def run(
    schema: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Rows],
    table: Callable[[Rows], Table],
) -> None:
    """Measures on every rank; the first one prints and writes its rows."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rows = measure(args)
    if dist.get_rank() == 0:
        record = {
            "schema": schema,
            "ranks": dist.get_world_size(),
            "lab": {key: os.environ.get(key) for key in ("LAB_HOSTS", "LAB_RATE", "LAB_RTT")},
            "width": args.width,
            "threads": args.threads,
            "versions": machine.versions(),
            "machine": machine.description(),
            "rows": rows,
        }
        if args.json:
            json_files.write(args.json, record)
        print(table(rows).text())
    dist.barrier()
    dist.destroy_process_group()
