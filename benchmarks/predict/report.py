"""The arguments, the table and the JSON file of predictions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.predict.arguments import positive_bits, workers
from benchmarks.predict.jobs import Job, Row
from hvd_compress.codecs import CODECS
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, PLANNED_NAMES

SCHEMA = "hvd_compress/predict/1"

MODEL = "a JSON file of shapes by name, or module:function that returns such shapes or a model"


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a job that :func:`add_options` has arguments for."""
    return {"overlap": not args.no_overlap, "threshold": args.threshold, "bits": args.bits}


def heading(job: Job, share: str = "a worker") -> str:
    """A line that names the job; ``share`` says whose images a batch has."""
    return f"{job.network.name}, {job.batch} images {share} and step, {job.profile.title}"


def report(title: str, rows: Sequence[Row]) -> None:
    """Prints the predictions, and why exchanges would refuse to run."""
    print(title)
    print(_table(rows))
    # The smallest number of workers stands for all: the rows come in their order.
    refused = {(row.codec, row.exchange): row.refused for row in reversed(rows) if row.refused}
    for (codec, exchange), reason in refused.items():
        print(textwrap.fill(f"* {codec}, {exchange}: {reason}", 110, subsequent_indent="  "))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file, in a folder that may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _table(rows: Sequence[Row]) -> str:
    header = (
        "codec",
        "exchange",
        "workers",
        "step ms",
        "computation",
        "encode",
        "wire",
        "decode",
        "sent MB",
        "images/s",
        "speed-up",
    )
    lines = [header, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    step, cost = row.step, row.step.exchange
    times = (step.seconds, step.computation, cost.encode, cost.wire, cost.decode)
    return (
        row.codec,
        row.exchange + ("*" if row.refused else ""),
        str(row.workers),
        *(f"{1e3 * seconds:,.1f}" for seconds in times),
        f"{cost.sent / 1e6:,.1f}",
        f"{row.images_per_second:,.0f}"
        if row.images_per_second >= 100
        else f"{row.images_per_second:.1f}",
        f"{row.speedup:,.2f}",
    )


def as_json(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
    """The job and its predictions as JSON types."""
    profile = job.profile
    return {
        "schema": SCHEMA,
        "model": job.network.name,
        "elements": job.network.elements,
        "batch": job.batch,
        "overlap": job.overlap,
        "bits": job.bits,
        "machine": {
            "profile": profile.name,
            "ranks_per_host": profile.local,
            "between": dataclasses.asdict(profile.between),
            "within": dataclasses.asdict(profile.within),
            "start": profile.start,
            "memory": profile.memory,
        },
        "rows": [row.to_json() for row in rows],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose workers, codecs, exchanges and the output."""
    add = parser.add_argument
    add(
        "--workers",
        type=workers,
        default=workers("1..512"),
        metavar="LIST",
        help="such as 1,2,4..512; default: 1..512",
    )
    add(
        "--codec",
        nargs="+",
        default=["none", "fp16", "int8"],
        metavar="CODEC",
        help=f"{', '.join(CODECS)} or an installed package's, with settings as in onebit:group=512",
    )
    add("--exchange", nargs="+", choices=PLANNED_NAMES, default=["two_shot"])
    add(
        "--threshold",
        type=int,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help="smaller tensors are left to Horovod; default: %(default)s",
    )
    add(
        "--bits",
        type=positive_bits,
        metavar="BITS",
        help="an element's, with coding=entropy; default: what normally distributed gradients take",
    )
    add("--no-overlap", action="store_true", help="exchange after the backward pass, not during it")
    add("--json", type=Path, metavar="FILE")
