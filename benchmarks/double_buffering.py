"""Half-batch double buffering beside exchanges of whole minibatches: 1-bit SGD's table 4, in kind.

``python -m benchmarks.lab --hosts 2 --rate 200mbit -- python -m benchmarks.double_buffering --json OUT``

Each minibatch size trains in both ways, a few minibatches of each in turns. A rank processes its share of
``--batch``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hvd_compress.distributed as hvdc
from benchmarks import compressions, machine
from benchmarks.command_line import Parser, compression, positive
from benchmarks.papers import models
from benchmarks.tables import Table
from hvd_compress.optim import DoubleBuffering

SCHEMA = "hvd_compress/double-buffering/1"
_INPUTS = 1024
_WAYS = {"whole": False, "halves": True}


class Way:
    """A network that trains in one of the ways.

    Args:
        chosen: what is sent.
        enabled: whether minibatches are cut in half.
        width: units of a layer.
    """

    def __init__(self, chosen: compressions.Compression, enabled: bool, width: int) -> None:
        torch.manual_seed(0)
        self._model = models.sigmoid(_INPUTS, width)
        named = list(self._model.named_parameters())
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        compressor = hvdc.Compression.by_name(chosen.name, **chosen.options)
        self._buffering = DoubleBuffering(named, optimizer, compressor, enabled=enabled)

    def seconds(self, batches: int, samples: int) -> float:
        """Of a minibatch, in so many of them of so many samples of this rank."""
        x, y = torch.randn(samples, _INPUTS), torch.randint(10, (samples,))
        dist.barrier()
        started = time.perf_counter()
        for _ in range(batches):
            for inputs, labels in self._buffering.parts(x, y):
                F.cross_entropy(self._model(inputs), labels).backward()
                self._buffering.step()
        self._buffering.flush()
        return (time.perf_counter() - started) / batches


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a compression and minibatch size, of this rank."""
    rows = []
    for text in args.compression:
        chosen = compressions.parse(text, {}, last_layer="")
        ways = {name: Way(chosen, on, args.width) for name, on in _WAYS.items()}
        for batch in args.batch:
            samples = batch // dist.get_world_size()
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for way in ways.values():
                way.seconds(2, samples)
            for number in range(args.rounds):
                for name in list(ways)[:: -1 if number % 2 else 1]:
                    seconds[name].append(ways[name].seconds(args.block, samples))
            gains = [w / h for w, h in zip(seconds["whole"], seconds["halves"], strict=True)]
            low, middle, high = statistics.quantiles(gains, n=4)
            rows.append(
                {
                    "compression": text,
                    "batch": batch,
                    "seconds": {name: statistics.median(own) for name, own in seconds.items()},
                    "gain": [middle, low, high],
                    "rounds": seconds,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a row."""
    header = ("compression", "minibatch", "whole ms", "halves ms", "times as fast", "middle half")
    return Table(
        header,
        [
            (
                row["compression"],
                f"{row['batch']:,}",
                f"{1e3 * row['seconds']['whole']:.1f}",
                f"{1e3 * row['seconds']['halves']:.1f}",
                f"{row['gain'][0]:.2f}",
                f"{row['gain'][1]:.2f} to {row['gain'][2]:.2f}",
            )
            for row in rows
        ],
    )


def main(command_line: list[str] | None = None) -> int:
    """Measures, and writes what the first rank has seen."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rows = measure(args)
    if dist.get_rank() == 0:
        record = {
            "schema": SCHEMA,
            "ranks": dist.get_world_size(),
            "lab": {key: os.environ.get(key) for key in ("LAB_HOSTS", "LAB_RATE", "LAB_RTT")},
            "width": args.width,
            "threads": args.threads,
            "versions": machine.versions(),
            "machine": machine.description(),
            "rows": rows,
        }
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
        print(table(rows).text())
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.double_buffering",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="OUT")
    add("--batch", type=positive, nargs="+", default=[64, 128, 256, 512, 1024], metavar="N")
    add("--width", type=positive, default=1024, help="units of each of three layers")
    add("--rounds", type=positive, default=8)
    add("--block", type=positive, default=4, help="minibatches of a way in a round")
    add("--threads", type=positive, default=1)
    add(
        "--compression",
        nargs="+",
        type=compression,
        default=["none", "onebit:group=column,exchange=two_shot"],
    )
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
