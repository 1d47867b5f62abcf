"""The record of all trainings that are over, the table and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import json_files
from benchmarks.intervals import mean
from benchmarks.pages.reading import label, signed
from benchmarks.pictures import figure
from benchmarks.plots import style
from benchmarks.tables import Table
from benchmarks.trained.training import Recipe
from benchmarks.verdicts import SAME_BITS, told

SCHEMA = "hvd_compress/trained/1"
BASELINE = "none"

Record = Mapping[str, Any]


def collect(
    recipe: Recipe, runs: Sequence[Mapping[str, Any]], lines: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """The record of trainings that are over.

    Raises:
        ValueError: there are none, or versions differ between them.
    """
    if not runs:
        raise ValueError("expected trainings that are over, got none")
    versions = runs[0]["versions"]
    if any(run["versions"] != versions for run in runs):
        raise ValueError(f"expected trainings with versions {versions} alone, got others as well")
    commits = sorted({run["machine"]["commit"] for run in runs})
    return {
        "schema": SCHEMA,
        "command": command,
        "recipe": asdict(recipe),
        "versions": versions,
        "machine": {**runs[0]["machine"], "commits": commits},
        "lines": lines,
        "runs": [
            {"method": run["method"], "seed": run["seed"], "result": run["result"]} for run in runs
        ],
    }


def read(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        ValueError: the file is not one.
    """
    return json_files.read(path, SCHEMA, lambda raw: raw)


def by_method(record: Record) -> dict[str, dict[int, dict[str, Any]]]:
    """The results by method and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in record["runs"]:
        found.setdefault(run["method"], {})[run["seed"]] = run["result"]
    return found


def differences(record: Record, method: str) -> list[float]:
    """The differences to uncompressed trainings of the same seeds, in bits a byte.

    Raises:
        ValueError: no seed is trained both ways.
    """
    found = by_method(record)
    own, control = found[method], found[BASELINE]
    seeds = sorted(own.keys() & control.keys())
    if not seeds:
        raise ValueError(f"{method}: expected a seed that {BASELINE} has, too, got none")
    return [own[seed]["test_bits"] - control[seed]["test_bits"] for seed in seeds]


def table(record: Record) -> Table:
    """A line for each method, and for each table of n-grams and program."""
    header = (
        *("", "bytes a step", "seeds", "test bits a byte"),
        *("difference", "95% interval", f"within {SAME_BITS}"),
    )
    lines = [_line(record, method) for method in by_method(record)]
    last = record["lines"]["tables"][-1]
    for order, bits in last["bits"].items():
        lines.append([f"a table of order {order}", "", "", f"{bits:.3f}", "", "", ""])
    for program, bits in record["lines"]["programs"].items():
        lines.append([f"`{program}`", "", "", f"{bits:.3f}", "", "", ""])
    return Table(header, lines)


def _line(record: Record, method: str) -> list[str]:
    results = by_method(record)[method]
    sent = fmean(one["message_bytes_per_step"] for one in results.values())
    bits = fmean(one["test_bits"] for one in results.values())
    cells = [label(method), f"{sent:,.0f}", str(len(results)), f"{bits:.3f}"]
    if method == BASELINE:
        return [*cells, "", "", ""]
    found = differences(record, method)
    if len(found) == 1:
        return [*cells, signed(found[0], 3), "", ""]
    interval = mean(found)
    ends = f"{signed(interval.low, 3)} to {signed(interval.high, 3)}"
    verdict = told(found, SAME_BITS, larger_is_better=False)
    return [*cells, signed(interval.mean, 3), ends, verdict]


def draw(record: Record, path: Path) -> None:
    """Draws test loss over the bytes seen, with the tables and programs, and differences by method."""
    recipe, found = record["recipe"], by_method(record)
    end = recipe["steps"] * recipe["batch"] * recipe["context"] / 1e6
    places = [end * (number + 1) / recipe["points"] for number in range(recipe["points"])]
    with figure(path, columns=2, size=(9.0, 4.6), width_ratios=(2.2, 1.0)) as axes:
        over, apart = axes[0]
        for number, (method, results) in enumerate(found.items()):
            curves = zip(*(one["curve"] for one in results.values()), strict=True)
            over.plot(places, [fmean(bits) for bits in curves], label=method, **style(number))
        _references(over, record["lines"])
        over.set(xlabel="megabytes of training text seen", ylabel="bits a byte of test text")
        over.set(xlim=(0, end), ylim=(1.3, 3.7))
        handles, labels = over.get_legend_handles_labels()
        place = "outside lower center"
        over.figure.legend(handles, labels, frameon=False, loc=place, ncols=5)
        _differences(apart, record)


def _references(axes: Any, lines: Mapping[str, Any]) -> None:
    text = {"textcoords": "offset points", "color": "0.35", "fontsize": "small"}
    seen = [one["bytes"] / 1e6 for one in lines["tables"]]
    middle = len(seen) // 2 - 1
    for order in lines["tables"][0]["bits"]:
        bits = [one["bits"][order] for one in lines["tables"]]
        axes.plot(seen, bits, "o-", color="0.6", ms=3, lw=0.8)
        place = (seen[middle], bits[middle])
        axes.annotate(f"table of order {order}", place, (0, -11), ha="center", **text)
    for program, bits in lines["programs"].items():
        axes.axhline(bits, color="0.7", lw=0.8, ls="--")
        axes.annotate(program, (0, bits), (4, 3), **text)


def _differences(axes: Any, record: Record) -> None:
    methods = [method for method in by_method(record) if method != BASELINE]
    axes.axvspan(-SAME_BITS, SAME_BITS, color="0.9")
    axes.axvline(0, color="0.6", lw=0.8)
    names = []
    for place, method in enumerate(methods):
        found = differences(record, method)
        several = len(found) > 1
        width = mean(found).half_width if several else 0.0
        color = style(1 + place)["color"]
        axes.errorbar([fmean(found)], [place], xerr=[width], fmt="o", color=color, capsize=3, ms=5)
        names.append(f"{method}\n{len(found)} seed{'s' * several}")
    axes.set_xscale("symlog", linthresh=0.02)
    axes.set(xlabel="bits a byte beyond none")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
