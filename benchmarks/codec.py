"""How fast the codecs are: nanoseconds per element and multiples of ``torch.Tensor.copy_``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import machine
from benchmarks.codec_cases import CODECS, BitsAndBytesCase, Buffers, CodecCase
from benchmarks.tables import Table
from benchmarks.timing import Timing, beside_copies
from hvd_compress.kernels.interface import Kernels

SCHEMA = "hvd_compress/codec/1"
QUICK_ELEMENTS = 1 << 16
_MEASURED = ("encode", "encode_with_feedback", "decode", "decode_and_add")


def measure(case: CodecCase | BitsAndBytesCase, buffers: Buffers, repeats: int) -> dict[str, Any]:
    """Times and error of one case."""
    destination, source = torch.from_numpy(buffers.out), torch.from_numpy(buffers.x)
    timings: dict[str, Timing | None] = dict.fromkeys(_MEASURED)
    case.encode()
    case.decode()
    error = _relative_error(buffers)
    for name in _MEASURED:
        work = getattr(case, name, None)
        if work is not None:
            timings[name] = beside_copies(
                work, lambda: destination.copy_(source), buffers.x.size, repeats
            )
    return {
        "config": case.config,
        "bits_per_element": case.bits,
        "relative_error": error,
        **{name: t and dataclasses.asdict(t) for name, t in timings.items()},
    }


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Multiples of a copy, with ns per element in brackets."""
    header = ("codec", "bits", "error", *(name.replace("_", " ") for name in _MEASURED))
    return Table(header, [_row(name, row) for name, row in rows.items()])


def main(command_line: list[str] | None = None) -> int:
    """Measures the codecs one after the other."""
    args = _parse(command_line)
    torch.set_num_threads(args.threads)
    kernels = _kernels(args.kernels, args.threads)
    buffers = Buffers(np.random.default_rng(0).standard_normal(args.elements, np.float32))
    chosen = [name for name in CODECS if any(fnmatch(name, f"{want}*") for want in args.codec)]
    with_bitsandbytes = importlib.util.find_spec("bitsandbytes") and args.codec == ["*"]
    rows: dict[str, dict[str, Any]] = {}
    with tqdm(chosen, disable=not sys.stderr.isatty()) as bar:
        for name in bar:
            bar.set_description(name)
            case = CodecCase(CODECS[name], kernels, buffers)
            rows[name] = measure(case, buffers, args.repeats)
    if with_bitsandbytes:
        rows[BitsAndBytesCase.name] = measure(BitsAndBytesCase(buffers), buffers, args.repeats)
    isa = getattr(kernels, "isa", "numpy")
    result = {
        "schema": SCHEMA,
        "elements": args.elements,
        "dtype": "float32",
        "threads": args.threads,
        "repeats": args.repeats,
        "kernels": kernels.name,
        "isa": isa,
        "versions": machine.versions(),
        "machine": machine.description(),
        "copy_ns_per_element": float(
            np.median([row["encode"]["copy_ns_per_element"] for row in rows.values()])
        ),
        "codecs": rows,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1))
    shown = table(rows)
    print(shown.markdown() if args.markdown else shown.text())
    print(
        f"\nmultiples of torch.Tensor.copy_ (ns per element), which took "
        f"{result['copy_ns_per_element']:.3f} ns per element; {args.elements} float32, "
        f"{args.threads} threads, {isa}, {machine.description()['cpu']}"
    )
    return 0


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="OUT")
    add("--elements", type=int, default=1 << 26)
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=9)
    add("--kernels", choices=("cpu", "oracle"), default="cpu")
    add("--codec", nargs="+", default=["*"], metavar="NAME", help="how the names begin")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--quick", action="store_true", help="a tiny tensor, once: whether it works at all")
    args = parser.parse_args(command_line)
    if args.quick:
        args.elements, args.repeats = QUICK_ELEMENTS, 1
    if not any(fnmatch(name, f"{want}*") for name in CODECS for want in args.codec):
        parser.error(f"--codec: expected beginnings of {', '.join(CODECS)}, got {args.codec}")
    return args


def _kernels(name: str, threads: int) -> Kernels:
    if name == "oracle":
        from hvd_compress.kernels.oracle import OracleKernels

        return OracleKernels()
    from hvd_compress.kernels.cpu import CpuKernels

    return CpuKernels(threads=threads)


def _relative_error(buffers: Buffers) -> float:
    """``|x - decoded|^2 / |x|^2``."""
    difference = buffers.x - buffers.out
    return float(np.dot(difference, difference) / np.dot(buffers.x, buffers.x))


def _row(name: str, row: dict[str, Any]) -> list[str]:
    times = [
        f"{row[m]['copies']:.2f} ({row[m]['ns_per_element']:.2f})" if row[m] else "-"
        for m in _MEASURED
    ]
    return [name, f"{row['bits_per_element']:.3f}", f"{row['relative_error']:.2g}", *times]


if __name__ == "__main__":
    sys.exit(main())
