"""Draws docs/images/step_times.svg from committed records: ``python docs/plot_step_times.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
RECORDS = {
    "1 Gbit/s": "lab-alexnet-1gbit.json",
    "200 Mbit/s": "lab-alexnet-200mbit.json",
}
SHOWN = {
    "none": ("Horovod", "0.75"),
    "fp16": ("Horovod, fp16", "0.5"),
    "onebit": ("hvd_compress, 1-bit", "C0"),
    "local": ("without any exchange", "0.2"),
}


def seconds(record: str) -> dict[str, float]:
    """Median time of a step by compression, over the seeds of a record."""
    runs = json.loads((ROOT / "benchmarks" / "records" / record).read_text())["runs"]
    return {
        name: median(r["step_seconds"]["median"] for r in runs if r["compression"] == name)
        for name in SHOWN
    }


def draw(path: Path) -> None:
    """Writes the picture."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hvd_compress", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    height = 0.2
    for row, record in enumerate(RECORDS.values()):
        for number, (name, value) in enumerate(seconds(record).items()):
            label, color = SHOWN[name]
            place = row + (number - 1.5) * height
            axes.barh(place, value, 0.9 * height, color=color, label=None if row else label)
            axes.text(value + 0.1, place, f"{value:.2f} s", va="center", fontsize=9)
    axes.set(xlim=(0, 12), xlabel="seconds a step")
    axes.set_yticks(range(len(RECORDS)), list(RECORDS))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("AlexNet on two hosts", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "step_times.svg")
