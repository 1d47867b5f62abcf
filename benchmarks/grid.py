"""Measures combinations of data and model parallelism, as in 1-bit SGD's table 5.

``python -m benchmarks.lab --hosts 2 --rate 200mbit -- python -m benchmarks.grid --json OUT``

D x M means D groups of M ranks. The ranks of a group divide the layers among them and exchange activations
and error signals; ranks with the same part of the layers average its gradients. 1 x 1 is a single rank. All
layouts of the job's ranks train a few minibatches each, in turns, in 32 bits and encoded.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import hvd_compress.distributed as hvdc
from benchmarks import compressions, group_job, turns
from benchmarks.models.chains import sigmoids
from benchmarks.models.torch import chain
from benchmarks.tables import Table
from hvd_compress.codecs import Codec, Int8, NoCompression
from hvd_compress.papers import ColumnParallelLinear, ParallelGroup, RowParallelLinear

SCHEMA = "hvd_compress/grid/1"
ALONE = (1, 1)
_INPUTS = 1024

KINDS: dict[str, tuple[Codec, str, dict[str, Any]]] = {
    "32 bits": (NoCompression(), "none", {}),
    "encoded": (Int8(), "onebit", {"group": "column", "exchange": "two_shot"}),
}
"""The codec of activations and error signals, and the compression of gradients with its options."""


class Layout:
    """This rank's part of the network in one layout.

    Args:
        shape: the number of data-parallel groups, and of ranks in each.
        kind: a key of :data:`KINDS`.
        width: the number of units in each layer.
        batch: the number of samples in a minibatch of the whole job.
    """

    def __init__(self, shape: tuple[int, int], kind: str, width: int, batch: int) -> None:
        torch.manual_seed(0)
        codec, name, options = KINDS[kind]
        self._idle = shape == ALONE and dist.get_rank() > 0
        self._samples = batch // shape[0]
        self._net: nn.Module = chain.build(sigmoids(3, width), 10, (_INPUTS,))
        self._compressor: hvdc.Compressor | None = None
        if shape != ALONE:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
            if shape[1] > 1:
                group = ParallelGroup(codec, process_group=mesh.get_group("model"))
                self._net = _shared(self._net, group)
            if shape[0] > 1:
                peers = mesh.get_group("data")
                self._compressor = compressions.make(hvdc, name, process_group=peers, **options)
        self._named = dict(self._net.named_parameters())
        self._optimizer = torch.optim.SGD(self._named.values(), lr=0.01, momentum=0.9)

    def train(self, batches: int) -> None:
        """Trains some minibatches."""
        # Idle ranks draw, too, so that the ranks of a group continue with the same random numbers.
        x, y = torch.randn(self._samples, _INPUTS), torch.randint(10, (self._samples,))
        if self._idle:
            return
        for _ in range(batches):
            self._optimizer.zero_grad()
            F.cross_entropy(self._net(x), y).backward()
            if self._compressor is not None:
                gradients = [p.grad for p in self._named.values() if p.grad is not None]
                hvdc.all_reduce(gradients, self._compressor, key=list(self._named))
            self._optimizer.step()


def _shared(net: nn.Module, group: ParallelGroup) -> nn.Module:
    """The network with pairs of parallel linear layers, each of which exchanges once in each direction."""
    kinds = iter(
        [
            lambda one: ColumnParallelLinear.from_linear(one, group, gather_output=False),
            lambda one: RowParallelLinear.from_linear(one, group, input_is_parallel=True),
        ]
        * 2
    )
    return nn.Sequential(
        *(next(kinds)(one) if isinstance(one, nn.Linear) else one for one in net.children())
    )


def layouts(size: int) -> list[tuple[int, int]]:
    """A single rank, and all layouts that use every rank, from data to model parallelism."""
    return [ALONE, *((size // m, m) for m in range(1, size + 1) if size % m == 0)]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures each minibatch size, layout and kind; returns step times, and ratios to a single rank's."""
    rows = []
    for batch in args.batch:
        made = {
            (shape, kind): Layout(shape, kind, args.width, batch)
            for shape in layouts(dist.get_world_size())
            for kind in KINDS
            if shape != ALONE or kind == next(iter(KINDS))
        }
        by_name = {_name(shape, kind): layout for (shape, kind), layout in made.items()}

        def turn(
            name: str, batches: int, by_name: dict[str, Layout] = by_name
        ) -> tuple[float, float]:
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            by_name[name].train(batches)
            dist.barrier()  # So that the time is the slowest rank's.
            return (
                (time.perf_counter() - started) / batches,
                (time.process_time() - used) / batches,
            )

        seconds = turns.measure(turn, list(by_name), args.rounds, args.block)
        for number, (shape, kind) in enumerate(made):
            row = turns.row(seconds[number], seconds[0])
            rows.append({"batch": batch, "layout": list(shape), "kind": kind, **row})
    return rows


def _name(shape: tuple[int, int], kind: str) -> str:
    return f"{shape[0]} x {shape[1]}, {kind}"


def table(rows: list[dict[str, Any]]) -> Table:
    """A table with one line for each row."""
    header = ("minibatch", "data x model", "", "samples/s", "times one rank", "middle half")
    lines = []
    for row in rows:
        speedups = 1 / np.quantile(row["ratio"], [0, 0.5, 1])
        lines.append(
            (
                f"{row['batch']:,}",
                "{} x {}".format(*row["layout"]),
                row["kind"],
                f"{row['batch'] / row['seconds']:,.0f}",
                f"{speedups[1]:.2f}",
                f"{speedups[2]:.2f} to {speedups[0]:.2f}",
            )
        )
    return Table(header, lines)


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; the first one prints and writes its times."""
    parser = group_job.parser("benchmarks.grid", __doc__, batches=[256, 2048])
    group_job.run(SCHEMA, parser.parse_args(command_line), measure, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
