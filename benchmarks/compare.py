"""Compares the codecs of a file with this package's: ``python -m benchmarks.compare my_codec.py``.

The file's codecs are checked by the contract of codecs, trained from the same seeds as the others on two
ranks, and timed beside copies of memory.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import accuracy, codec, codec_file, json_files, launch, machine, report, results
from benchmarks.codec_cases import Buffers, CodecCase, Make
from benchmarks.command_line import Parser, compression
from benchmarks.compressions import parse
from benchmarks.pages.reading import label, signed
from benchmarks.recipes import RANKS, RECIPES, Recipe
from benchmarks.results import Results
from benchmarks.tables import Table
from benchmarks.trainers import FRAMEWORKS
from benchmarks.verdicts import SAME_BITS, SAME_POINTS, told
from hvd_compress.exchanges.routing import Route
from hvd_compress.kernels.cpu_batch import CpuBatch
from hvd_compress.kernels.native import spec_of
from hvd_compress.kernels.reference import ReferenceBatch

BASELINE = accuracy.BASELINE
COMPRESSIONS = ["int8", "ecq", "onebit"]
"""The compressions that a codec is compared with by default, beside none: 8, 4 and 1 bits an element."""
SCHEMA = "hvd_compress/compare/1"
COLUMNS = (
    *("method", "memory", "workers", "dataset", "model", "optimizer", "seed", "step"),
    *("top_1_accuracy", "test_bits", "data_volume", "throughput"),
)
"""The columns of the file of trainings. All but ``seed`` and ``test_bits`` are columns of GRACE's published
measurements, too."""
_CLOCK = "process_time"
"""The processor's time in one thread, which other jobs on the machine change least."""
_QUICK = ("--steps", "10")


def trained(args: argparse.Namespace, name: str, own: list[str], others: list[str]) -> Results:
    """The trainings of a recipe, of which the output folder may hold some already.

    Those of the file's codecs are kept for each version of the file.

    Raises:
        ValueError: trainings in the folder were made with other settings.
        launch.RankError: a rank failed.
    """
    prefix = f"{name}-quick" if args.quick else name
    version = f"{prefix}-{args.file.stem}-{codec_file.digest(args.file)[:12]}"
    found = []
    for stem, chosen in ((prefix, others), (version, own)):
        runs = args.out / f"{stem}.json"
        command = accuracy.arguments(RECIPES[name], FRAMEWORKS[0], runs, chosen, args.seeds)
        command += ["--codec-file", str(args.file.resolve())] if chosen is own else []
        launch.horovodrun(RANKS, "benchmarks.train", [*command, *_QUICK * args.quick])
        found.append(results.read(runs))
    seeds = range(accuracy.FIRST_SEED, accuracy.FIRST_SEED + args.seeds)
    wanted = ((one, seed) for one in (*others, *own) for seed in seeds)
    made = [run for one, seed in wanted for part in found if (run := part.find(one, seed))]
    return dataclasses.replace(found[-1], runs=made)


def timed(route: Route, buffers: Buffers, repeats: int) -> dict[str, Any]:
    """The times of a codec's NumPy reference and of its kernels, by :func:`benchmarks.codec.measure`.

    A codec without kernels has none of theirs, and a codec that writes no payloads has none at all.
    """
    if route.codec.exchange is not None:
        return {}
    makers: dict[str, Make] = {"reference": ReferenceBatch}
    if spec_of(route.codec, (1,)) is not None:
        makers["cpu"] = CpuBatch
    return {
        name: codec.measure(CodecCase(route.codec, make, buffers), buffers, repeats, _CLOCK)
        for name, make in makers.items()
    }


def rows(outcome: Results, recipe: Recipe) -> list[dict[str, Any]]:
    """One row for each compression: that of :func:`benchmarks.accuracy.compare`, bits, and a verdict."""
    found, runs = accuracy.compare(outcome, recipe), report.by_compression(outcome)
    plain, accurate = found[0], recipe.measure == "test_accuracy"
    for row in found:
        own = [value - plain["by_seed"][seed] for seed, value in row["by_seed"].items()]
        ratios = [run.compression_ratio or math.nan for run in runs[row["compression"]]]
        row["bits_per_element"] = 32 / statistics.fmean(ratios)
        row["data_volume"] = row["message_bytes_per_step"] / plain["message_bytes_per_step"]
        row["verdict"] = told(own, SAME_POINTS if accurate else SAME_BITS, accurate)
    return found


def table(record: dict[str, Any]) -> Table:
    """A line for each recipe and method.

    Data volume and quality are what GRACE (Xu et al., ICDCS 2021) compares methods by.
    """
    lines = [
        _line(name, row, record["methods"][row["compression"]])
        for name, part in record["recipes"].items()
        for row in part["compressions"]
    ]
    known = ("recipe", "method", "error", "feedback", "bits an element", "data volume", "quality")
    times = (f"encode, decode in {executor}, copies" for executor in ("NumPy", "C++"))
    return Table((*known, "difference", "verdict", *times), lines, left=4)


def _line(name: str, row: dict[str, Any], method: dict[str, Any]) -> list[str]:
    recipe, plain = RECIPES[name], row["compression"] == BASELINE
    numbers = (signed(row[one], recipe.digits) for one in ("difference", "low", "high"))
    times = (method["times"].get(executor) for executor in ("reference", "cpu"))
    return [
        name,
        label(row["compression"]),
        "" if plain else method["error"],
        f"{method['alpha']:g}" if method["alpha"] else "",
        f"{row['bits_per_element']:.2f}",
        f"{row['data_volume']:.3f}",
        f"{row[recipe.measure]:.{recipe.digits}f}{'%' if recipe.scale == 100 else ''}",
        *(("", "") if plain else ("{} ({} to {})".format(*numbers), row["verdict"])),
        *(
            f"{one['encode']['copies']:.3g}, {one['decode']['copies']:.3g}" if one else ""
            for one in times
        ),
    ]


def trainings(outcomes: dict[str, Results], methods: dict[str, dict[str, Any]]) -> str:
    """One line of CSV for each training, with :data:`COLUMNS`.

    ``memory`` says whether there is error feedback. ``data_volume`` is in bytes a worker and step,
    ``throughput`` in samples a second of all workers.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, outcome in outcomes.items():
        settings = [outcome.configuration[one] for one in ("data", "model", "optimizer")]
        for run in outcome.runs:
            memory = "true" if methods[run.compression]["alpha"] else "false"
            rate = RECIPES[name].batch * run.steps / (run.train_seconds or math.nan)
            method = [run.compression, memory, outcome.ranks, *settings, run.seed, run.steps]
            quality = [run.test_accuracy, run.test_bits]
            writer.writerow([*method, *quality, run.message_bytes_per_step, rate])
    return text.getvalue()


def main(command_line: list[str] | None = None) -> int:
    """Checks, trains, measures times, prints a table and writes it with a record of all results."""
    args = _arguments(command_line)
    try:
        names = codec_file.load(args.file)
        chosen = [compression(one) for one in args.compression or [*COMPRESSIONS, *names]]
        chosen = list(dict.fromkeys([BASELINE, *chosen]))
        routes = {one: parse(one, {}, "").split()[0] for one in chosen}
        own = [one for one in chosen if one.partition(":")[0] in names]
        if not own:
            raise ValueError(f"--compression: expected some of {', '.join(names)}, got none")
        for one in own:
            print(f"{one}: checked by the contract of codecs ...", end=" ", flush=True)
            codec_file.check(routes[one].codec)
            print("holds")
        others = [one for one in chosen if one not in own]
        outcomes = {name: trained(args, name, own, others) for name in dict.fromkeys(args.recipe)}
    except (TypeError, ValueError, argparse.ArgumentTypeError, launch.RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = _record(args, routes, outcomes)
    shown = table(record)
    json_files.write(args.out / "compare.json", record)
    json_files.replace(args.out / "compare.md", shown.markdown() + "\n")
    json_files.replace(args.out / "compare.csv", trainings(outcomes, record["methods"]))
    print(f"\n{shown.text()}\n\nwritten to {args.out}/compare.json, compare.md and compare.csv")
    return min(1, sum(map(report.check, outcomes.values())))


def _record(
    args: argparse.Namespace, routes: dict[str, Route], outcomes: dict[str, Results]
) -> dict[str, Any]:
    """The record, for which the times are measured."""
    elements, repeats = (1 << 16, 1) if args.quick else (1 << 22, 5)
    torch.set_num_threads(1)
    buffers = Buffers(np.random.default_rng(0).standard_normal(elements, np.float32))
    methods = {
        one: {
            "config": route.codec.to_config(),
            "error": route.codec.error,
            "alpha": route.feedback.alpha,
            "beta": route.feedback.beta,
            "times": timed(route, buffers, repeats),
        }
        for one, route in tqdm(routes.items(), desc="times")
    }
    parts = {
        name: {
            "configuration": outcome.configuration,
            "ranks": outcome.ranks,
            "unit": f"{RECIPES[name].unit}, paired by seed, 95% t interval",
            "compressions": rows(outcome, RECIPES[name]),
        }
        for name, outcome in outcomes.items()
    }
    about = {"versions": machine.versions(), "machine": machine.description()}
    times = {"elements": elements, "repeats": repeats, "threads": 1, "clock": _CLOCK}
    return {"schema": SCHEMA, **about, "times": times, "methods": methods, "recipes": parts}


def _arguments(command_line: list[str] | None) -> argparse.Namespace:
    description, _, rest = str(__doc__).partition("\n\n")
    parser = Parser(prog="python -m benchmarks.compare", description=f"{description} {rest}")
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a Python file that defines codecs")
    add("--recipe", nargs="+", choices=tuple(RECIPES), default=["digits", "text"],
        help="default: LeNet on digits with momentum, and a transformer on text with AdamW")  # fmt: skip
    add("--seeds", type=accuracy.several, default=3, help="default: 3")
    add("--compression", nargs="+", metavar="NAME[:key=value,...]",
        help=f"beside {BASELINE}; default: {' '.join(COMPRESSIONS)} and the file's codecs")  # fmt: skip
    add("--out", type=Path, default=Path("build/compare"), help="a folder")
    add("--quick", action="store_true", help="train for ten steps, to see whether it works")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
