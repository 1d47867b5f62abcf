"""Compares half-batch double buffering with exchanges of whole minibatches, as in 1-bit SGD's table 4.

``python -m benchmarks.lab --hosts 2 --rate 200mbit -- python -m benchmarks.double_buffering --json OUT``

For each minibatch size, both ways train a few minibatches in turns. A rank has its share of ``--batch``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hvd_compress.distributed as hvdc
from benchmarks import compressions, group_job, turns
from benchmarks.command_line import compression
from benchmarks.models.chains import sigmoids
from benchmarks.models.torch import chain
from benchmarks.tables import Table
from hvd_compress.papers import DoubleBuffering

SCHEMA = "hvd_compress/double-buffering/1"
_INPUTS = 1024
_WAYS = {"whole": False, "halves": True}


class Way:
    """A network that trains with whole minibatches or with halves.

    Args:
        chosen: the compression of the gradients.
        enabled: whether minibatches are cut in half.
        width: the number of units in each layer.
    """

    def __init__(self, chosen: compressions.Compression, enabled: bool, width: int) -> None:
        torch.manual_seed(0)
        self._model = chain.build(sigmoids(3, width), 10, (_INPUTS,))
        named = list(self._model.named_parameters())
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        compressor = compressions.make(hvdc, chosen.name, **chosen.options)
        self._buffering = DoubleBuffering(named, optimizer, compressor, enabled=enabled)

    def seconds(self, batches: int, samples: int) -> float:
        """Trains some minibatches with ``samples`` on this rank; returns the seconds of a minibatch."""
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
    """Measures each compression and minibatch size; returns a row for each, with this rank's times."""
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
                for name in turns.order(list(ways), number):
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
    """A table with one line for each row."""
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
    """Measures on every rank; the first one prints and writes its times."""
    parser = group_job.parser(
        "benchmarks.double_buffering", __doc__, batches=[64, 128, 256, 512, 1024]
    )
    parser.add_argument(
        "--compression",
        nargs="+",
        type=compression,
        default=["none", "onebit:group=column,exchange=two_shot"],
    )
    group_job.run(SCHEMA, parser.parse_args(command_line), measure, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
