"""The table and the picture of a record."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.rate import parse
from benchmarks.pictures import figure
from benchmarks.plots import style
from benchmarks.tables import Table

Cells = list[dict[str, Any]]


def table(cells: Cells, rtt: str) -> Table:
    """Seconds with one round trip: a line a method, a column for each number of hosts and rate.

    The least of a column is marked with a star.
    """
    here = sorted(
        (cell for cell in cells if cell["rtt"] == rtt),
        key=lambda cell: (cell["hosts"], _mbit(cell)),
    )
    header = ("method", *(f"{c['hosts']} hosts, {_mbit(c):g} Mbit/s" for c in here))
    least = [min(map(_seconds, cell["rows"].values())) for cell in here]
    lines = []
    for name in _names(here):
        own = [_seconds(cell["rows"][name]) for cell in here]
        shown = [f"{a:.3g}{'*' if a == b else ''}" for a, b in zip(own, least, strict=True)]
        lines.append((name, *shown))
    return Table(header, lines)


def costs(cells: Cells) -> Table:
    """One line a method: error, processor seconds and megabytes of a host, by the number of hosts."""
    hosts = sorted({cell["hosts"] for cell in cells})
    shown = ("error", "CPU s", "sent, MB")
    header = ("method", *(f"{what}, {one} hosts" for what in shown for one in hosts))
    lines = []
    for name in _names(cells):
        of = {one: [c["rows"][name] for c in cells if c["hosts"] == one] for one in hosts}
        lines.append(
            (
                name,
                *(f"{of[one][0]['error']:.2g}" for one in hosts),
                *(f"{_median(of[one], 1):.2f}" for one in hosts),
                *(f"{_median(of[one], 2) / 1e6:.3g}" for one in hosts),
            )
        )
    return Table(header, lines)


def draw(cells: Cells, path: Path) -> None:
    """Writes the picture: seconds over the rate, a panel for each number of hosts and round trip."""
    hosts = sorted({cell["hosts"] for cell in cells})
    rates = sorted({_mbit(cell) for cell in cells})
    trips = list(dict.fromkeys(cell["rtt"] for cell in cells))
    size = (3.2 * len(hosts) + 1.8, 2.9 * len(trips) + 0.3)
    with figure(path, len(trips), len(hosts), size=size, sharex=True, sharey=True) as panels:
        for line, trip in zip(panels, trips, strict=True):
            for axes, count in zip(line, hosts, strict=True):
                here = [c for c in cells if (c["hosts"], c["rtt"]) == (count, trip)]
                here.sort(key=lambda cell: _mbit(cell))
                for number, name in enumerate(_names(cells)):
                    points = [(_mbit(c), _seconds(c["rows"][name])) for c in here]
                    axes.plot(
                        *zip(*points, strict=True), label=name, marker="o", ms=3, **style(number)
                    )
                axes.set(xscale="log", yscale="log", title=f"{count} hosts, {_trip(trip)}")
                axes.grid(True, which="both", alpha=0.25)
                axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
                axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        whole = panels[0][0].figure
        whole.supxlabel("rate of each host's link, Mbit/s", fontsize="medium")
        whole.supylabel("seconds", fontsize="medium")
        handles, labels = panels[0][0].get_legend_handles_labels()
        whole.legend(handles, labels, loc="outside right center", frameon=False)


def _mbit(cell: dict[str, Any]) -> float:
    bits = parse(cell["rate"]).bits
    assert bits is not None
    return bits / 1e6


def _names(cells: Cells) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell["rows"]))


def _seconds(row: dict[str, Any]) -> float:
    return median(one[0] for one in row["rounds"])


def _median(rows: list[dict[str, Any]], column: int) -> float:
    return median(one[column] for row in rows for one in row["rounds"])


def _trip(text: str) -> str:
    return "no distance" if text == "none" else f"{text} round trip"
