"""Predicts the time of a training step: ``python -m benchmarks.predict``, see docs/perfmodel.md.

The networks and clusters of the papers have names; others are files of shapes, and links with a rate.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.pictures import pyplot
from benchmarks.predict import plots
from benchmarks.predict.arguments import add_machine, duration, machine_of, routes
from benchmarks.predict.jobs import sweep
from benchmarks.predict.networks import NETWORKS, named
from benchmarks.predict.profiles import PROFILES
from benchmarks.predict.report import (
    MODEL,
    add_options,
    as_json,
    heading,
    options,
    report,
    write_json,
)
from benchmarks.predict.sweep import job, optimal_workers


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
        help="whether more workers mean more images per step, or fewer for each worker",
    )
    add(
        "--batch",
        type=int,
        metavar="N",
        help="images per step, of each worker (weak) or of all (strong); default: the profile's",
    )
    add(
        "--compute",
        type=duration,
        metavar="TIME",
        help="measured step of a single worker, such as 0.4s, instead of the profile's",
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
            pyplot()  # Fails before a long prediction if Matplotlib is missing.
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
