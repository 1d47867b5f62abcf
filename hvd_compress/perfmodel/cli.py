"""``hvd-compress predict``: what training would take with other workers, links, codecs and exchanges."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_compress.codecs import SCHEMES
from hvd_compress.exchange.routing import DEFAULT_THRESHOLD, EXCHANGES, Route
from hvd_compress.perfmodel import profiles
from hvd_compress.perfmodel.machines import Link
from hvd_compress.perfmodel.networks import NETWORKS
from hvd_compress.perfmodel.sweep import Job, Row, optimal_workers, sweep

SCHEMA = "hvd_compress/predict/1"

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

ETHERNET = 1448 / 1514
"""Of a full Ethernet frame, what is a TCP message's."""


def bandwidth(text: str) -> float:
    """Bytes a second of ``1gbit``, ``200mbit``, ``2.5gbit``; infinite for ``none``.

    Raises:
        ValueError: anything else.
    """
    if text.lower() == "none":
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower())
    if not match or not float(match[1]):
        raise ValueError(f"expected a rate such as 1gbit, 200mbit or none, got {text!r}")
    return float(match[1]) * _UNITS[match[2]] / 8


def duration(text: str) -> float:
    """Seconds of ``50us``, ``0.1ms`` or ``2s``.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(us|ms|s)", text.lower())
    if not match:
        raise ValueError(f"expected a time such as 50us, 0.1ms or 2s, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def workers(text: str) -> list[int]:
    """Reads ``1,2,4..512``: numbers, and with two dots all doublings between them.

    Raises:
        ValueError: anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        if not match or not int(match[1]):
            raise ValueError(f"expected numbers of workers such as 1,2,4..512, got {text!r}")
        count = int(match[1])
        while count <= int(match[2] or match[1]):
            found.append(count)
            count *= 2
    return sorted(set(found))


def routes(codecs: Sequence[str], exchanges: Sequence[str]) -> list[Route]:
    """Every codec through every exchange; once, where Horovod itself reduces it.

    Args:
        codecs: schemes, with settings after a colon, as in ``onebit:group=512``.
        exchanges: names of exchanges.

    Raises:
        ValueError, TypeError: there is no such scheme or exchange, or it takes no such setting.
    """
    made: list[Route] = []
    for text in codecs:
        name, _, settings = text.partition(":")
        if name not in SCHEMES:
            raise ValueError(f"codec: expected one of {', '.join(SCHEMES)}, got {name!r}")
        fields = dict(_setting(part) for part in settings.split(",") if part)
        scheme = SCHEMES[name]
        for exchange in exchanges:
            route = Route(scheme.codec(**fields), scheme.feedback, exchange)
            if not route.dense or route.codec not in [known.codec for known in made if known.dense]:
                made.append(route)
    return made


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs the command; its arguments are those of the process if none are given."""
    parser = _parser()
    args = parser.parse_args(command_line)
    try:
        return _predict(args)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _predict(args: argparse.Namespace) -> int:
    profile = _profile(args)
    network = NETWORKS[args.model]()
    if args.batch is None and network.name not in profile.rates:
        raise ValueError(
            f"--batch: expected images of a step, for {network.name} on {profile.name}"
        )
    batch = profile.rates[network.name].batch if args.batch is None else args.batch
    job = Job(
        network,
        profile,
        batch,
        args.scaling,
        seconds=args.compute,
        overlap=not args.no_overlap,
        threshold=args.threshold,
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
        print(f"* {codec}, {exchange}: {reason}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_as_json(job, rows, best), indent=2) + "\n")
    if args.plot:
        from hvd_compress.perfmodel.plots import throughput

        throughput(rows, args.plot, title=_heading(job))
    return 0


def _profile(args: argparse.Namespace) -> profiles.Profile:
    profile = profiles.load(args.machine)
    between, within = profile.between, profile.within
    if args.link is not None:
        between = Link(args.link * args.efficiency, between.latency)
    if args.latency is not None:
        between = Link(between.bandwidth, args.latency)
    if args.within is not None:
        within = Link(args.within, within.latency)
    if args.speeds is not None:
        profile = profile.with_speeds(
            profiles.speeds_of_record(json.loads(args.speeds.read_text()))
        )
    return dataclasses.replace(
        profile,
        between=between,
        within=within,
        local=profile.local if args.local is None else args.local,
        start=profile.start if args.start is None else args.start,
    )


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


def _setting(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"codec: expected settings as key=value, got {text!r}")
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            continue
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvd-compress", description="Gradient compression.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    predict = commands.add_parser(
        "predict",
        help="predict step times and throughput",
        description="Predicts the time of a training step: docs/perfmodel.md has the equations.",
    )
    add = predict.add_argument
    add("--model", choices=tuple(NETWORKS), default="alexnet")
    add(
        "--workers",
        type=_type(workers),
        default=workers("1..512"),
        metavar="LIST",
        help="such as 1,2,4..512; default: 1..512",
    )
    add(
        "--codec",
        nargs="+",
        default=["none", "fp16", "onebit"],
        metavar="CODEC",
        help=f"{', '.join(SCHEMES)}, with settings as in onebit:group=512",
    )
    add("--exchange", nargs="+", choices=EXCHANGES, default=["two_shot"])
    add(
        "--machine",
        choices=profiles.names(),
        default="terngrad_ethernet",
        help="profile of machines and links",
    )
    add("--local", type=int, metavar="N", help="ranks of a machine, in place of the profile's")
    add(
        "--link",
        type=_type(bandwidth),
        metavar="RATE",
        help="link of a machine, such as 1gbit, in place of the profile's",
    )
    add(
        "--efficiency",
        type=float,
        default=ETHERNET,
        metavar="SHARE",
        help="of --link's rate, what is left for messages; default: TCP over Ethernet, %(default).3f",
    )
    add(
        "--latency",
        type=_type(duration),
        metavar="TIME",
        help="of a message, such as 50us",
    )
    add("--within", type=_type(bandwidth), metavar="RATE", help="link of a rank within its machine")
    add(
        "--start",
        type=_type(duration),
        metavar="TIME",
        help="of a collective before its first message",
    )
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
        type=_type(duration),
        metavar="TIME",
        help="measured step of a worker alone, such as 0.4s, in place of the profile's",
    )
    add(
        "--speeds",
        type=Path,
        metavar="FILE",
        help="codec speeds, by python -m benchmarks.codec --json",
    )
    add(
        "--threshold",
        type=int,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help="smaller tensors are left to Horovod; default: %(default)s",
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
    return parser


def _type(read: Any) -> Any:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
