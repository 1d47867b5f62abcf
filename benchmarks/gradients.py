"""Measures the exchange of all gradients of a model, without training, through each compressor.

``python -m benchmarks.lab --hosts 8 --rate 100mbit -- python -m benchmarks.gradients --json OUT``

All gradients are available at the start, and are submitted from the last layer to the first, as Horovod's
optimizer does. So encoding, transfer and decoding of different layers overlap; ``benchmarks.exchange``
measures one message at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import hvd_compress.torch as hvdc
from benchmarks import compressions, json_files, machine
from benchmarks.command_line import Parser, compression, positive
from benchmarks.compressions import Compression
from benchmarks.models import MODELS
from benchmarks.models.torch import build
from benchmarks.results import Seconds
from benchmarks.tables import Table, si_bytes

SCHEMA = "hvd_compress/gradients/1"
DEFAULT = ["fp16", "onebit:exchange=allgather", "onebit:exchange=two_shot"]

_SAMPLE = 256
"""The number of elements at the beginning of each gradient that are checked on all ranks."""

_TOLERANCE = 1e-5
"""The largest permitted difference between float32 sums, relative to the largest gradient."""


class Gradients:
    """A model's parameters with normally distributed gradients, different on every rank."""

    def __init__(self, model: str) -> None:
        # On the meta device, so that only gradients take memory.
        with torch.device("meta"):
            shapes = [(name, p.shape) for name, p in build(model).named_parameters()]
        self.parameters = [(name, nn.Parameter(torch.empty(shape))) for name, shape in shapes]
        self.tensors: list[torch.Tensor] = []
        """The gradients before an exchange, and the results after it."""
        self._values: list[torch.Tensor] = []
        for index, (_, parameter) in enumerate(self.parameters):
            drawn = np.random.default_rng([index, hvd.rank()])
            self._values.append(
                torch.from_numpy(drawn.standard_normal(parameter.shape, np.float32))
            )
            self.tensors.append(torch.empty(parameter.shape))
            parameter.grad = self.tensors[-1]
        self.elements = sum(value.numel() for value in self._values)

    def reset(self) -> None:
        """Replaces the last results by this rank's gradients."""
        for tensor, value in zip(self.tensors, self._values, strict=True):
            tensor.copy_(value)

    def sample(self) -> np.ndarray:
        """The first elements of all gradients, shape=(n,), float64."""
        return _sample(self.tensors)


class Side:
    """A compressor, with gradients that all compressors share.

    Args:
        gradients: the model's gradients.
        compression: the compression.
        threads: the number of threads of the kernels.
    """

    def __init__(self, gradients: Gradients, compression: Compression, threads: int) -> None:
        self._gradients = gradients
        self.compressor = compressions.make(
            hvdc,
            compression.name,
            gradients.parameters,
            **{"name": compression.text, "threads": threads, **compression.options},
        )
        self._name = compression.text

    def exchange(self) -> float:
        """Exchanges all gradients, after a barrier; returns the seconds."""
        self._gradients.reset()
        self.compressor.reset_counters()
        hvd.barrier()
        started = time.perf_counter()
        under_way = []
        names = [name for name, _ in self._gradients.parameters]
        for name, tensor in reversed(list(zip(names, self._gradients.tensors, strict=True))):
            sent, context = self.compressor.compress(tensor)
            handle = hvd.allreduce_async_(sent, name=f"{self._name}.{name}", op=hvd.Average)
            under_way.append((tensor, handle, context))
        for tensor, handle, context in under_way:
            while not hvd.poll(handle):
                time.sleep(2e-4)
            result = self.compressor.decompress(hvd.synchronize(handle), context)
            if result.data_ptr() != tensor.data_ptr():
                tensor.copy_(result)
        return time.perf_counter() - started

    def verify(self) -> bool:
        """Whether a first exchange gives all ranks the same result, and loses nothing.

        The result and the residuals of ranks and owners must add up to the average of the gradients.
        Without error feedback, this is checked for casts only.
        """
        self._gradients.reset()
        mean = _mean(self._gradients.sample())
        self.exchange()
        digest = hashlib.sha256()
        for tensor in self._gradients.tensors:
            digest.update(tensor.numpy().tobytes())
        digests = hvd.allgather(
            torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)[None]
        )
        alike = bool((digests == digests[0]).all())
        routes = self.compressor.routes().values()
        if not all(route.uncompressed or route.feedback.enabled for route in routes):
            return alike
        kept, owned = self._residuals()
        found = self._gradients.sample() + _mean(kept) + hvd.size() * _mean(owned)
        error = float(np.abs(found - mean).max() / np.abs(mean).max())
        cast = any(route.uncompressed and route.cast_dtype == "float16" for route in routes)
        return alike and error < (1e-2 if cast else _TOLERANCE)

    def _residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples of this rank's residuals, and of the residuals of the parts it owns; float64."""
        tensors = self.compressor.state_dict()["tensors"]
        kept, owned = [], []
        for name, parameter in self._gradients.parameters:
            both = torch.zeros(2, parameter.numel())
            state = tensors.get(name, {})
            if state.get("residual") is not None:
                both[0] = state["residual"].reshape(-1)
            part = state.get("owned")
            if part is not None and part["residual"] is not None:
                both[1, part["begin"] : part["end"]] = part["residual"]
            kept.append(both[0])
            owned.append(both[1])
        return _sample(kept), _sample(owned)


def measure(
    gradients: Gradients, chosen: Sequence[Compression], threads: int, repeats: int, bar: tqdm
) -> list[dict[str, Any]]:
    """Exchanges with all compressors in turns; returns a row for each, the same on every rank."""
    sides = {one.text: Side(gradients, one, threads) for one in chosen}
    right = {}
    for text, side in sides.items():
        right[text] = side.verify()
        bar.update()
    numbers: dict[str, list[list[float]]] = {text: [] for text in sides}
    for _ in range(repeats):
        for text, side in sides.items():
            seconds = side.exchange()
            counters = side.compressor.counters
            numbers[text].append(
                [seconds, counters.encode_seconds, counters.decode_seconds, counters.wire_bytes]
            )
            bar.update()
    return [_row(text, numbers[text], right[text], gradients.elements) for text in sides]


def _row(text: str, own: list[list[float]], right: bool, elements: int) -> dict[str, Any]:
    """A row of the results: the exchange's time is the slowest rank's; the rest are means over ranks."""
    everyone = hvd.allgather(torch.tensor([own], dtype=torch.float64)).numpy()
    everyone_right = hvd.allgather(torch.tensor([float(right)])).all()
    median, p10, p90 = (float(q) for q in np.quantile(everyone[..., 0].max(0), [0.5, 0.1, 0.9]))
    encode, decode, wire = np.median(everyone.mean(0), 0)[1:].tolist()
    return {
        "compression": text,
        "elements": elements,
        "wire_bytes": wire,
        "seconds": dataclasses.asdict(Seconds(median, p10, p90)),
        "encode_seconds": encode,
        "decode_seconds": decode,
        "right": bool(everyone_right),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """A table with one line for each compression."""
    header = ("compression", "sent", "ms", "encode ms", "decode ms", "times the first's", "right")
    first = rows[0]["seconds"]["median"]
    return Table(
        header,
        [
            [
                row["compression"],
                si_bytes(row["wire_bytes"]),
                f"{1e3 * row['seconds']['median']:.0f}",
                f"{1e3 * row['encode_seconds']:.0f}",
                f"{1e3 * row['decode_seconds']:.0f}",
                f"{first / row['seconds']['median']:.2f}",
                "yes" if row["right"] else "NO",
            ]
            for row in rows
        ],
    )


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; returns 0 if all results were right, and 1 otherwise."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    hvd.init()
    last_layer = MODELS[args.model].last_layer
    chosen = [compressions.parse(text, {}, last_layer) for text in args.compression]
    gradients = Gradients(args.model)
    quiet = hvd.rank() != 0 or not sys.stderr.isatty()
    with tqdm(total=len(chosen) * (1 + args.repeats), disable=quiet) as bar:
        rows = measure(gradients, chosen, args.threads, args.repeats, bar)
    wrong = [row["compression"] for row in rows if not row["right"]]
    if hvd.rank() == 0:
        record = {
            "schema": SCHEMA,
            "model": args.model,
            "ranks": hvd.size(),
            **machine.network(),
            "threads": args.threads,
            "repeats": args.repeats,
            "versions": machine.versions(),
            "machine": machine.description(),
            "rows": rows,
        }
        json_files.write(args.json, record)
        shown = table(rows)
        print(shown.markdown() if args.markdown else shown.text())
        if wrong:
            print(f"error: ranks differ, or gradient was lost: {', '.join(wrong)}", file=sys.stderr)
    hvd.barrier()
    return min(1, len(wrong))


def _mean(own: np.ndarray) -> np.ndarray:
    return hvd.allreduce(torch.from_numpy(own), op=hvd.Average).numpy()


def _sample(tensors: Any) -> np.ndarray:
    parts = [tensor.reshape(-1)[:_SAMPLE].double().numpy() for tensor in tensors]
    return np.concatenate(parts)


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.gradients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--model", choices=tuple(MODELS), default="alexnet")
    add("--compression", nargs="+", type=compression, default=DEFAULT, metavar="NAME[:key=value,...]",
        help=f"default: {' '.join(DEFAULT)}")  # fmt: skip
    add("--repeats", type=positive, default=3, help="exchanges of each; default: 3")
    add("--threads", type=positive, default=1, help="threads a rank; default: 1")
    add("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
