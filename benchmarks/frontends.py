"""Compares the times of encoding and decoding in TensorFlow's frontend with those in torch's.

Each frontend encodes the gradients of a model with their residuals, and decodes its own payloads, as
in a training step but without Horovod. The two take turns, and each turn gives one ratio.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from benchmarks import json_files, machine
from benchmarks.command_line import Parser, positive
from benchmarks.models import MODELS
from benchmarks.models import torch as models
from benchmarks.tables import Table
from hvd_compress.codecs import CODECS
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import Common
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.layout import whole
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route
from hvd_compress.tensorflow.buckets import GraphBucket
from hvd_compress.tensorflow.coder import Coder
from hvd_compress.tensorflow.exchanges.base import member_of
from hvd_compress.tensorflow.slots import GraphSlot

SCHEMA = "hvd_compress/frontends/1"


class TorchSide:
    """Encodes and decodes as ``hvd_compress.torch`` does."""

    def __init__(self, route: Route, gradients: Sequence[np.ndarray], threads: int) -> None:
        self._batches = Batches(Common(Executors(threads), Group(0, 1)))
        self._gradients = [torch.from_numpy(gradient) for gradient in gradients]
        self._slots = [
            Slot(name=f"gradient.{i}", index=i, parameter=gradient, route=route)
            for i, gradient in enumerate(self._gradients)
        ]

    def step(self) -> None:
        """Does one step's work on all gradients, in one bucket."""
        given = [gradient.clone() for gradient in self._gradients]
        batch, exchanging = self._batches.make(self._slots, given)
        Run(exchanging, batch, name="bucket")  # A single rank has its results at once.
        batch.write(1.0)
        batch.settle(False)


class GraphSide:
    """Encodes and decodes by TensorFlow's operations, in one bucket of one graph."""

    def __init__(self, route: Route, gradients: Sequence[np.ndarray], threads: int) -> None:
        self._coder = Coder(0, 0, threads)
        self._gradients = [tf.constant(gradient) for gradient in gradients]
        self._slots = [
            GraphSlot(i, tf.float32, gradient.shape, route)
            for i, gradient in enumerate(self._gradients)
        ]
        self._bucket = GraphBucket(0, "allgather", scale=1.0)  # Nothing is sent.
        for slot in self._slots:
            self._bucket.add(slot)
        self._coder.expect(1, len(gradients))
        layout = whole(list(map(member_of, self._slots)), 0)
        self._coder.lay_out(1, self._bucket, self._slots, [layout])
        self._run = tf.function(self._trace)

    def step(self) -> None:
        """Does one step's work on all gradients."""
        self._run(self._gradients)

    def _trace(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        bucket, coder = self._bucket, self._coder
        begun, _ = coder.operations.hvdc_begin(coder.ledger, graph=1, first=True)
        tokens = [
            coder.submit(bucket, member, gradient, begun, slot.handles)
            for member, (slot, gradient) in enumerate(zip(self._slots, gradients, strict=True))
        ]
        run, first = coder.run, (tokens[0], tf.constant(True))
        message, _, encoded = run("encode", bucket, *first, warmup=0, ranks=1)
        decoded = run("decode", bucket, message, encoded, what="payloads", ranks=1)
        sums = [
            run("result", bucket, tokens[member], gradient, member=member)
            for member, gradient in enumerate(gradients)
        ]
        with tf.control_dependencies([decoded, *sums]):
            return tf.identity(begun)


@dataclass(frozen=True)
class Turn:
    """The seconds of one step: wall-clock time, and processor time of all threads."""

    wall: float
    cpu: float


def measure(route: Route, gradients: Sequence[np.ndarray], threads: int, repeats: int) -> dict:
    """Measures both frontends in turns; returns median seconds, and quantiles of the turns' ratios."""
    sides = TorchSide(route, gradients, threads), GraphSide(route, gradients, threads)
    for side in sides:
        side.step()
    turns = [[_timed(side.step) for side in sides] for _ in range(repeats)]
    result: dict[str, Any] = {"config": route.codec.to_config()}
    for clock in ("wall", "cpu"):
        theirs, ours = ([getattr(turn[i], clock) for turn in turns] for i in range(2))
        ratios = [o / t for o, t in zip(ours, theirs, strict=True)]
        result[clock] = {
            "torch_seconds": statistics.median(theirs),
            "tensorflow_seconds": statistics.median(ours),
            "ratio": statistics.median(ratios),
            "ratio_p10": float(np.quantile(ratios, 0.1)),
            "ratio_p90": float(np.quantile(ratios, 0.9)),
        }
    return result


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """A table with one line for each codec."""
    header = ("codec", "torch ms", "TensorFlow ms", "ratio", "10% to 90%", "ratio of CPU time")
    lines = []
    for name, row in rows.items():
        wall, cpu = row["wall"], row["cpu"]
        times = [f"{1e3 * wall[side]:.1f}" for side in ("torch_seconds", "tensorflow_seconds")]
        spread = f"{wall['ratio_p10']:.2f} to {wall['ratio_p90']:.2f}"
        lines.append([name, *times, f"{wall['ratio']:.2f}", spread, f"{cpu['ratio']:.2f}"])
    return Table(header, lines)


def main(command_line: list[str] | None = None) -> int:
    """Measures the codecs one after the other, prints a table and writes the record."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    # Operations run one at a time, each with the kernel's threads, as in torch.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(shape, np.float32) for shape in _shapes(args.model)]
    rows = {}
    for name in args.codec:
        route = Route(CODECS[name](), exchange="allgather")
        rows[name] = measure(route, gradients, args.threads, args.repeats)
    result = {
        "schema": SCHEMA,
        "model": args.model,
        "elements": sum(gradient.size for gradient in gradients),
        "tensors": len(gradients),
        "threads": args.threads,
        "repeats": args.repeats,
        "versions": machine.versions(),
        "machine": machine.description(),
        "codecs": rows,
    }
    json_files.write(args.json, result)
    shown = table(rows)
    print(shown.markdown() if args.markdown else shown.text())
    print(
        f"\none step of {args.model}: {len(gradients)} tensors, {result['elements']} elements, "
        f"{args.threads} threads, {args.repeats} turns, {machine.description()['cpu']}"
    )
    return 0


def _shapes(model: str) -> list[tuple[int, ...]]:
    parameters = models.build(model).parameters()
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return [shape for shape in shapes if math.prod(shape) >= DEFAULT_THRESHOLD]


def _timed(work: Callable[[], None]) -> Turn:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    encoded = [name for name, codec in CODECS.items() if not Route(codec()).uncompressed]
    parser = Parser(prog="python -m benchmarks.frontends", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--model", choices=tuple(MODELS), default="alexnet")
    add("--codec", nargs="+", choices=encoded, default=encoded, metavar="NAME")
    add("--threads", type=positive, default=1)
    add("--repeats", type=positive, default=15)
    add("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
