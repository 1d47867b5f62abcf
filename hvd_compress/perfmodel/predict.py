"""``hvd-compress predict``, which predicts training times for workers, links, codecs and exchanges."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_compress.codecs import CODECS
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, EXCHANGE_NAMES
from hvd_compress.perfmodel import plots
from hvd_compress.perfmodel.arguments import (
    add_machine,
    converter,
    duration,
    machine_of,
    positive_bits,
    routes,
    workers,
)
from hvd_compress.perfmodel.networks import NETWORKS
from hvd_compress.perfmodel.own_network import network_of
from hvd_compress.perfmodel.sweep import Job, Row, optimal_workers, sweep

SCHEMA = "hvd_compress/predict/1"


def _predict(args: argparse.Namespace) -> int:
    profile = machine_of(args)
    network = network_of(args.model)
    missing = []
    if args.compute is None and args.model not in NETWORKS:
        missing.append("--compute: expected the time of a step without exchange, such as 120ms")
    if args.batch is None and network.name not in profile.rates:
        missing.append("--batch: expected images of a step, such as 32")
    if missing:
        said = ", got none; ".join(missing)
        raise ValueError(f"{said}, got none, for {network.name} on {profile.name}")
    if args.plot:
        plots.pyplot()  # Before a long prediction, not after it.
    batch = profile.rates[network.name].batch if args.batch is None else args.batch
    job = Job(
        network,
        profile,
        batch,
        args.scaling,
        seconds=args.compute,
        overlap=not args.no_overlap,
        threshold=args.threshold,
        bits=args.bits,
    )
    chosen = routes(args.codec, args.exchange)
    rows = sweep(job, chosen, args.workers)
    best: dict[str, int] = {}
    if args.optimal:
        best = {str(route): optimal_workers(job, route, args.optimal) for route in chosen}
    print(_heading(job))
    print(_table(rows))
    for route, count in best.items():
        print(f"{route}: computation and wire take equally long with about {count} workers")
    # The smallest number of workers stands for all: the rows come in their order.
    refused = {(row.codec, row.exchange): row.refused for row in reversed(rows) if row.refused}
    for (codec, exchange), reason in refused.items():
        print(textwrap.fill(f"* {codec}, {exchange}: {reason}", 110, subsequent_indent="  "))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_as_json(job, rows, best), indent=2) + "\n")
    if args.plot:
        plots.throughput(rows, args.plot, title=_heading(job))
    return 0


def _heading(job: Job) -> str:
    share = "a worker" if job.scaling == "weak" else "in all"
    return f"{job.network.name}, {job.batch} images {share} and step, {job.profile.title}"


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
    step = row.step
    times = (step.seconds, step.computation, step.encode, step.wire, step.decode)
    return (
        row.codec,
        row.exchange + ("*" if row.refused else ""),
        str(row.workers),
        *(f"{1e3 * seconds:,.1f}" for seconds in times),
        f"{step.wire_bytes / 1e6:,.1f}",
        f"{row.images_per_second:,.0f}"
        if row.images_per_second >= 100
        else f"{row.images_per_second:.1f}",
        f"{row.speedup:,.2f}",
    )


def _as_json(job: Job, rows: Sequence[Row], best: dict[str, int]) -> dict[str, Any]:
    profile = job.profile
    return {
        "schema": SCHEMA,
        "model": job.network.name,
        "elements": job.network.elements,
        "batch": job.batch,
        "scaling": job.scaling,
        "overlap": job.overlap,
        "bits": job.bits,
        "machine": {
            "profile": profile.name,
            "ranks_per_host": profile.local,
            "between": dataclasses.asdict(profile.between),
            "within": dataclasses.asdict(profile.within),
            "start": profile.start,
            "memory": profile.memory,
            "sources": dict(profile.sources),
        },
        "optimal_workers": best,
        "rows": [row.to_json() for row in rows],
    }


def add_to(commands: Any) -> None:
    """Adds the command to ``hvd-compress``."""
    predict = commands.add_parser(
        "predict",
        help="predict step times and throughput",
        description="Predicts the time of a training step: docs/perfmodel.md has the equations.",
    )
    add = predict.add_argument
    add(
        "--model",
        default="alexnet",
        help=f"{', '.join(NETWORKS)}; or one of your own, with --compute: a JSON file of shapes by "
        f"name, or module:function that returns such shapes or a model; default: %(default)s",
    )
    add(
        "--workers",
        type=converter(workers),
        default=workers("1..512"),
        metavar="LIST",
        help="such as 1,2,4..512; default: 1..512",
    )
    add(
        "--codec",
        nargs="+",
        default=["none", "fp16", "onebit"],
        metavar="CODEC",
        help=f"{', '.join(CODECS)} or an installed package's, with settings as in onebit:group=512",
    )
    add("--exchange", nargs="+", choices=EXCHANGE_NAMES, default=["two_shot"])
    add_machine(predict, default="terngrad_ethernet")
    add(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="more workers: more images a step, or fewer for each",
    )
    add(
        "--batch",
        type=int,
        metavar="N",
        help="images a step, of a worker (weak) or of all (strong); default: the profile's",
    )
    add(
        "--compute",
        type=converter(duration),
        metavar="TIME",
        help="measured step of a worker alone, such as 0.4s, in place of the profile's",
    )
    add(
        "--threshold",
        type=int,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help="smaller tensors are left to Horovod; default: %(default)s",
    )
    add(
        "--bits",
        type=converter(positive_bits),
        metavar="BITS",
        help="an element's, with coding=entropy; default: what normally distributed gradients take",
    )
    add("--no-overlap", action="store_true", help="exchange after the backward pass, not during it")
    add(
        "--optimal",
        type=int,
        default=0,
        metavar="LIMIT",
        help="also say how many workers, up to LIMIT, keep processors and wire busy",
    )
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="a picture of images a second over workers")
    predict.set_defaults(run=_predict)
