"""Predictions for the papers' networks and clusters: ``python -m benchmarks.predict``.

It takes the options of ``hvd-compress predict``, and more: named networks and machines whose rates are
known, strong scaling, the best number of workers, and a picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.predict import plots
from benchmarks.predict.networks import NETWORKS, named
from benchmarks.predict.profiles import PROFILES
from benchmarks.predict.sweep import job, optimal_workers
from hvd_compress.perfmodel.arguments import add_machine, converter, duration, machine_of, routes
from hvd_compress.perfmodel.predict import (
    MODEL,
    add_options,
    as_json,
    heading,
    options,
    report,
    write_json,
)
from hvd_compress.perfmodel.sweep import sweep


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.predict", description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        default="alexnet",
        help=f"{', '.join(NETWORKS)}; or one of your own, with --compute: {MODEL}; default: %(default)s",
    )
    add_machine(parser, PROFILES, default="terngrad_ethernet")
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
    add_options(parser)
    add(
        "--optimal",
        type=int,
        default=0,
        metavar="LIMIT",
        help="also say how many workers, up to LIMIT, keep processors and wire busy",
    )
    add("--plot", type=Path, metavar="FILE", help="a picture of images a second over workers")
    return parser


def main(command_line: list[str] | None = None) -> int:
    """Prints the predictions."""
    args = _parser().parse_args(command_line)
    try:
        if args.plot:
            plots.pyplot()  # Before a long prediction, not after it.
        profile = machine_of(args, PROFILES)
        work = job(
            named(args.model),
            profile,
            batch=args.batch,
            seconds=args.compute,
            scaling=args.scaling,
            **options(args),
        )
        chosen = routes(args.codec, args.exchange)
        rows = sweep(work, chosen, args.workers)
        best = {}
        if args.optimal:
            best = {str(route): optimal_workers(work, route, args.optimal) for route in chosen}
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    title = heading(work, "a worker" if args.scaling == "weak" else "in all")
    report(title, rows)
    for route, count in best.items():
        print(f"{route}: computation and wire take equally long with about {count} workers")
    if args.json:
        content = as_json(work, rows)
        content["scaling"], content["optimal_workers"] = args.scaling, best
        content["machine"]["sources"] = dict(profile.sources)
        write_json(args.json, content)
    if args.plot:
        plots.throughput(rows, args.plot, title=title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
