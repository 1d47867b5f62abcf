"""Measures the codecs' speed: nanoseconds per element, multiples of the time of ``torch.Tensor.copy_``, and
bandwidth as a share of a triad's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import json_files, machine
from benchmarks.codec_cases import CODECS, Buffers, CodecCase, Make
from benchmarks.codec_others import OTHERS, BitsAndBytesCase, PiQuantCase
from benchmarks.command_line import Parser, positive
from benchmarks.tables import Table
from benchmarks.timing import Timing, beside

SCHEMA = "hvd_compress/codec/1"
QUICK_ELEMENTS = 1 << 16
_MEASURED = {"encode": 4, "encode_with_feedback": 12, "decode": 4}
"""The measured operations, and the bytes of gradient, residual and output that each moves per element;
residuals in bfloat16 make it 4 less."""


def measure(
    case: CodecCase | BitsAndBytesCase | PiQuantCase,
    buffers: Buffers,
    repeats: int,
    clock: str = "perf_counter",
) -> dict[str, Any]:
    """Measures the times and the error of one case, by a clock of :func:`benchmarks.timing.beside`."""
    destination, source = torch.from_numpy(buffers.out), torch.from_numpy(buffers.x)
    scratch = torch.from_numpy(buffers.scratch)
    timings: dict[str, Timing | None] = dict.fromkeys(_MEASURED)
    case.encode()
    decoded = case.decode()
    error = _relative_error(buffers.x, buffers.out if decoded is None else decoded)
    for name, values in _MEASURED.items():
        work = getattr(case, name, None)
        if name == "encode_with_feedback" and buffers.residual_dtype == "bfloat16":
            values -= 4
        if work is not None:
            timings[name] = beside(
                work,
                lambda: destination.copy_(source),
                lambda: torch.add(source, scratch, alpha=0.5, out=destination),
                buffers.x.size,
                values + case.bits / 8,
                repeats,
                clock,
            )
    return {
        "config": case.config,
        "bits_per_element": case.bits,
        "relative_error": error,
        **{name: t and dataclasses.asdict(t) for name, t in timings.items()},
    }


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Multiples of a copy's time, with ns per element and the share of a triad's bandwidth in brackets."""
    header = ("codec", "bits", "error", *(name.replace("_", " ") for name in _MEASURED))
    return Table(header, [_row(name, row) for name, row in rows.items()])


def main(command_line: list[str] | None = None) -> int:
    """Measures the codecs one after the other, prints a table and writes the record."""
    args = _parse(command_line)
    if args.device == "cuda":
        return _on_gpu(args)
    torch.set_num_threads(args.threads)
    make, isa = _kernels(args.kernels, args.threads)
    numbers = np.random.default_rng(0).standard_normal(args.elements, np.float32)
    buffers = Buffers(numbers, args.residual_dtype)
    chosen = _chosen(args)
    others = OTHERS if args.codec == ["*"] else ()
    rows: dict[str, dict[str, Any]] = {}
    with tqdm(chosen, disable=not sys.stderr.isatty()) as bar:
        for name in bar:
            bar.set_description(name)
            case = CodecCase(CODECS[name], make, buffers)
            rows[name] = measure(case, buffers, args.repeats)
    for other in others:
        rows[other.name] = measure(other(buffers, args.threads), buffers, args.repeats)
    result = {
        "schema": SCHEMA,
        "elements": args.elements,
        "dtype": "float32",
        "residual_dtype": args.residual_dtype,
        "threads": args.threads,
        "repeats": args.repeats,
        "kernels": args.kernels,
        "isa": isa,
        "versions": machine.versions(),
        "machine": machine.description(),
        "copy_ns_per_element": float(
            np.median([row["encode"]["copy_ns_per_element"] for row in rows.values()])
        ),
        "triad_gigabytes_per_second": _triad(rows),
        "codecs": rows,
    }
    json_files.write(args.json, result)
    shown = table(rows)
    print(shown.markdown() if args.markdown else shown.text())
    print(
        f"\nmultiples of torch.Tensor.copy_ (ns per element; share of a triad's bandwidth); a "
        f"copy took {result['copy_ns_per_element']:.3f} ns per element, a triad moved "
        f"{result['triad_gigabytes_per_second']:.1f} GB/s; {args.elements} float32, "
        f"{args.threads} threads, {isa}, {machine.description()['cpu']}"
    )
    return 0


def _on_gpu(args: argparse.Namespace) -> int:
    """Measures on a GPU, at the given size and at a small one, for which launches take most of the time."""
    from benchmarks import codec_cuda

    sizes = dict.fromkeys((args.elements, min(args.elements, codec_cuda.SMALL_ELEMENTS)))
    results = [
        codec_cuda.run(_chosen(args), size, args.repeats, args.codec == ["*"], args.residual_dtype)
        for size in sizes
    ]
    record = {
        "schema": codec_cuda.SCHEMA,
        "versions": machine.versions(),
        "machine": machine.description(),
        "sizes": results,
    }
    json_files.write(args.json, record)
    for result in results:
        shown = codec_cuda.table(result)
        print(shown.markdown() if args.markdown else shown.text())
        print(
            f"\nshare of a copy's bandwidth (microseconds); {result['elements']} float32, "
            f"{result['gpu']}, a copy moves {result['copy_bytes_per_second'] / 1e12:.2f} TB/s, an empty "
            f"launch takes {result['empty_launch_seconds'] * 1e6:.1f} microseconds\n"
        )
    return int(any("failed" in row for result in results for row in result["codecs"].values()))


def _chosen(args: argparse.Namespace) -> list[str]:
    return [name for name in CODECS if any(fnmatch(name, f"{want}*") for want in args.codec)]


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.codec", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--elements", type=positive, default=1 << 26)
    add("--threads", type=positive, default=2)
    add("--repeats", type=positive, default=9)
    add("--kernels", choices=("cpu", "reference"), default="cpu")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--residual-dtype", choices=("float32", "bfloat16"), default="float32")
    add("--codec", nargs="+", default=["*"], metavar="NAME", help="how codecs' names begin")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--quick", action="store_true", help="measure a tiny tensor once, to see whether it works")
    args = parser.parse_args(command_line)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU and a torch for CUDA, got neither or only one")
    if args.quick:
        args.elements, args.repeats = QUICK_ELEMENTS, 1
    if args.kernels == "reference" and args.residual_dtype != "float32":
        parser.error(
            "--residual-dtype: expected float32 with --kernels reference, for NumPy's sake"
        )
    if not any(fnmatch(name, f"{want}*") for name in CODECS for want in args.codec):
        parser.error(f"--codec: expected beginnings of {', '.join(CODECS)}, got {args.codec}")
    return args


def _kernels(name: str, threads: int) -> tuple[Make, str]:
    """Makes batches with the named kernels; the instruction set, for the record."""
    if name == "reference":
        from hvd_compress.kernels.reference import ReferenceBatch

        return ReferenceBatch, "numpy"
    from hvd_compress.kernels.cpu_batch import CpuBatch
    from hvd_compress.kernels.cpu_library import isa

    return partial(CpuBatch, threads=threads), isa()


def _relative_error(x: np.ndarray, decoded: np.ndarray) -> float:
    """The relative squared error, ``|x - decoded|^2 / |x|^2``."""
    difference = x - decoded
    return float(np.dot(difference, difference) / np.dot(x, x))


def _triad(rows: dict[str, dict[str, Any]]) -> float:
    """The median bandwidth of the triads in 10^9 bytes a second."""
    found = [
        row[name]["gigabytes_per_second"] / row[name]["bandwidth"]
        for row in rows.values()
        for name in _MEASURED
        if row[name]
    ]
    return float(np.median(found))


def _row(name: str, row: dict[str, Any]) -> list[str]:
    times = [
        f"{row[m]['copies']:.2f} ({row[m]['ns_per_element']:.2f}; {row[m]['bandwidth']:.0%})"
        if row[m]
        else "-"
        for m in _MEASURED
    ]
    return [name, f"{row['bits_per_element']:.3f}", f"{row['relative_error']:.2g}", *times]


if __name__ == "__main__":
    sys.exit(main())
