"""Measures exchanges over message sizes: their time, algorithm bandwidth and bus bandwidth.

``python -m benchmarks.lab --hosts 4 --rate 1gbit -- python -m benchmarks.exchange --json OUT``
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from tqdm import tqdm

from benchmarks import json_files, machine
from benchmarks.command_line import Parser
from benchmarks.exchanges import EXCHANGES, exchange
from benchmarks.exchanges.base import Clock, Exchange, Work
from benchmarks.results import Seconds
from benchmarks.tables import Table, si_bytes
from hvd_compress.exchanges.steps import FLOAT_BYTES
from hvd_compress.torch.collectives import HorovodCollectives

SCHEMA = "hvd_compress/exchange/1"
DEFAULT = ["allreduce:none", "allreduce:fp16", "allgather:onebit", "allgather:int8"]


def measure(
    exchanges: dict[str, Exchange],
    collectives: HorovodCollectives,
    elements: int,
    *,
    threads: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Measures all exchanges of one size in turns, so that all are disturbed alike.

    Returns:
        One row for each exchange, the same on every rank.
    """
    gradient = torch.from_numpy(_gradient(elements, collectives.rank))
    works = {name: case.prepare(collectives, threads, elements) for name, case in exchanges.items()}
    errors = {
        name: _verify(exchanges[name], work, collectives, gradient) for name, work in works.items()
    }
    clocks: dict[str, list[Clock]] = {name: [] for name in exchanges}
    for _ in range(repeats):
        for name, work in works.items():
            hvd.barrier()
            clock = Clock()
            work(gradient, clock)
            clocks[name].append(clock)
    return [
        _row(name, case, elements, collectives.size, errors[name], clocks[name])
        for name, case in exchanges.items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """A table with one line for each exchange and size; bandwidths are in Mbit/s, as links' rates are."""
    parts = list(dict.fromkeys(part for row in rows for part in row["parts"]))
    header = (
        "exchange",
        "elements",
        "gradient",
        "sent",
        "ms",
        *(f"{part} ms" for part in parts),
        "alg Mbit/s",
        "bus Mbit/s",
        "right",
    )
    return Table(header, [_cells(row, parts) for row in rows])


def main(command_line: list[str] | None = None) -> int:
    """Measures on every rank; returns 0 if all sums were right, and 1 otherwise."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    hvd.init()
    collectives = HorovodCollectives(None, "benchmark")
    rows: list[dict[str, Any]] = []
    quiet = collectives.rank != 0 or not sys.stderr.isatty()
    for elements in tqdm(args.elements, disable=quiet):
        rows += measure(
            args.exchange, collectives, elements, threads=args.threads, repeats=args.repeats
        )
    if collectives.rank == 0:
        _write(args.json, args, rows)
        shown = table(rows)
        print(shown.markdown() if args.markdown else shown.text())
    wrong = [row for row in rows if row["error"] is None]
    if wrong and collectives.rank == 0:
        names = ", ".join(f"{row['exchange']} of {row['elements']}" for row in wrong)
        print(f"error: expected the reference's sums, got others from {names}", file=sys.stderr)
    hvd.barrier()
    return min(1, len(wrong))


def _verify(
    case: Exchange, work: Work, collectives: HorovodCollectives, gradient: torch.Tensor
) -> float | None:
    """The largest error of a first exchange; None if it is too large, or if ranks differ.

    Only one rank compares its result with the reference, which is slow; the ranks compare digests.
    """
    result = work(gradient, Clock()).numpy()
    digest = np.frombuffer(hashlib.sha256(result.tobytes()).digest(), np.uint8)
    digests = hvd.allgather(torch.from_numpy(digest.copy())[None], name="digest")
    right = np.zeros(2)
    if collectives.rank == 0:
        gradients = [_gradient(gradient.numel(), rank) for rank in range(collectives.size)]
        total, bound = case.answer(gradients)
        error = np.abs(result - total)
        right[:] = (error <= bound).all() and (digests == digests[0]).all().item(), error.max()
    # The other ranks add zeros, and sleep meanwhile, because the reference needs the processors.
    handle = collectives.all_reduce(torch.from_numpy(right), "right")
    ok, largest = handle.wait().tolist()
    return largest if ok else None


def _gradient(elements: int, rank: int) -> np.ndarray:
    """A rank's normally distributed gradient, shape=(n,), float32, the same on every rank that draws it."""
    return np.random.default_rng([elements, rank]).standard_normal(elements, np.float32)


def _row(
    name: str, case: Exchange, elements: int, ranks: int, error: float | None, clocks: list[Clock]
) -> dict[str, Any]:
    """A row of the results: an exchange takes as long as its slowest rank; parts are means over ranks."""
    own = np.array([[clock.parts.get(part, 0.0) for part in case.parts] for clock in clocks])
    everyone = hvd.allgather(torch.from_numpy(own)[None], name="clocks").numpy()
    totals = everyone.sum(2).max(0)
    median, p10, p90 = (float(q) for q in np.quantile(totals, [0.5, 0.1, 0.9]))
    means = np.median(everyone.mean(0), 0)
    return {
        "exchange": name,
        "config": case.config,
        "elements": elements,
        "gradient_bytes": FLOAT_BYTES * elements,
        "wire_bytes": case.wire_bytes(elements, ranks),
        "seconds": dataclasses.asdict(Seconds(median, p10, p90)),
        "parts": {part: float(mean) for part, mean in zip(case.parts, means, strict=True)},
        "algorithm_bytes_per_second": case.algorithm_bandwidth(elements, median),
        "bus_bytes_per_second": case.bus_bandwidth(elements, ranks, median),
        "error": error,
    }


def _cells(row: dict[str, Any], parts: list[str]) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.2f}"

    def mbit(byte_rate: float) -> str:
        return f"{8e-6 * byte_rate:.0f}"

    return [
        row["exchange"],
        str(row["elements"]),
        si_bytes(row["gradient_bytes"]),
        si_bytes(row["wire_bytes"]),
        ms(row["seconds"]["median"]),
        *(ms(row["parts"].get(part)) for part in parts),
        mbit(row["algorithm_bytes_per_second"]),
        mbit(row["bus_bytes_per_second"]),
        "NO" if row["error"] is None else "yes",
    ]


def _write(path: Path, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    record = {
        "schema": SCHEMA,
        "ranks": hvd.size(),
        "ranks_per_host": hvd.local_size(),
        **machine.network(),
        "dtype": "float32",
        "threads": args.threads,
        "repeats": args.repeats,
        "versions": machine.versions(),
        "machine": machine.description(),
        "rows": rows,
    }
    json_files.write(path, record)


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.exchange", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--exchange", nargs="+", default=DEFAULT, metavar="NAME:COMPRESSION[:key=value,...]",
        help=f"{', '.join(EXCHANGES)}; default: {' '.join(DEFAULT)}")  # fmt: skip
    add("--min-bytes", type=_size, default="4K", metavar="SIZE",
        help="the smallest gradient; default: 4K")  # fmt: skip
    add("--max-bytes", type=_size, default="64M", metavar="SIZE",
        help="the largest gradient; default: 64M")  # fmt: skip
    add("--factor", type=_factor, default=4, help="the ratio of successive sizes; default: 4")
    add("--elements", type=_size, nargs="+", metavar="N", help="these sizes instead, in elements")
    add("--repeats", type=_size, default=9, help="exchanges of each size and kind; default: 9")
    add("--threads", type=_size, default=1, help="threads a rank; default: 1")
    add("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args(command_line)
    try:
        args.exchange = {text: exchange(text) for text in args.exchange}
    except (TypeError, ValueError) as error:
        parser.error(f"--exchange: {error}")
    if args.elements is None:
        if args.max_bytes < args.min_bytes:
            parser.error("--max-bytes: expected no less than --min-bytes")
        args.elements = _sweep(args.min_bytes, args.max_bytes, args.factor)
    return args


def _sweep(smallest: int, largest: int, factor: int) -> list[int]:
    """The numbers of elements from the smallest to the largest size, in geometric progression."""
    sizes = [max(1, smallest // FLOAT_BYTES)]
    while sizes[-1] * factor * FLOAT_BYTES <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    value = (
        int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]] if match else 0
    )
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number such as 4096, 64K or 1G, got {text!r}")
    return value


def _factor(text: str) -> int:
    value = _size(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected 2 or more, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
