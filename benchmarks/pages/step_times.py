"""AlexNet's step times on two hosts: a picture and a table of docs/performance.md."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.pages.reading import record
from benchmarks.pictures import figure
from benchmarks.tables import Table

RECORDS = {
    "1 Gbit/s": "lab-alexnet-1gbit",
    "200 Mbit/s": "lab-alexnet-200mbit",
}
OTHERS = {
    "1 Gbit/s, Zen 3": "lab-alexnet-1gbit-zen3",
    "1 Gbit/s, Zen 4": "lab-alexnet-1gbit-zen4",
}
"""The records of other processors; that of the picture is a Xeon with AVX-512."""
SHOWN = {
    "none": ("Horovod", "0.75"),
    "fp16": ("Horovod, fp16", "0.5"),
    "onebit": ("hvd_compress, 1-bit", "C0"),
    "local": ("without any exchange", "0.2"),
}


def rounds(name: str) -> dict[str, list[float]]:
    """The median seconds of a step by compression, one number for each seed of a record."""
    found: dict[str, list[float]] = {choice: [] for choice in SHOWN}
    for run in record(name)["runs"]:
        found[run["compression"]].append(run["step_seconds"]["median"])
    return found


def seconds(name: str) -> dict[str, float]:
    """The median of :func:`rounds`."""
    return {choice: median(own) for choice, own in rounds(name).items()}


def table() -> Table:
    """A line for each choice, with milliseconds of a step."""
    found = {link: seconds(name) for link, name in {**RECORDS, **OTHERS}.items()}
    lines = [
        (label, *(f"{1e3 * times[choice]:,.0f}" for times in found.values()))
        for choice, label in (
            ("local", "no exchange"),
            ("none", "none"),
            ("fp16", "fp16 (Horovod's allreduce)"),
            ("onebit", "onebit"),
        )
    ]
    for other in ("none", "fp16"):
        times = (f"{one[other] / one['onebit']:.1f}" for one in found.values())
        lines.append((f"**onebit, times as fast as {other}**", *times))
    return Table(("ms a step", *found), lines)


def draw(path: Path) -> None:
    """Writes the picture."""
    with figure(path, font=10, size=(4.95, 3.2)) as ((axes,),):
        height = 0.2
        for row, of_link in enumerate(RECORDS.values()):
            for number, (name, value) in enumerate(seconds(of_link).items()):
                label, color = SHOWN[name]
                place = row + (number - 1.5) * height
                axes.barh(place, value, 0.9 * height, color=color, label=None if row else label)
                axes.text(value + 0.1, place, f"{value:.2f} s", va="center", fontsize=9)
        axes.set(xlim=(0, 13), xlabel="seconds a step")
        axes.set_yticks(range(len(RECORDS)), list(RECORDS))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("AlexNet on two hosts", loc="left")
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=2, frameon=False, fontsize=9
        )
