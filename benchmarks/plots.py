"""Loss curves as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.results import Results, Run


def loss_curves(outcome: Results, path: Path) -> None:
    """Draws the training loss over steps and over bytes sent, means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (over_steps, over_bytes) = plt.subplots(
        1, 2, figsize=(12, 4.8), sharey=True, layout="constrained"
    )
    for index, name in enumerate(dict.fromkeys(run.compression for run in outcome.runs)):
        runs = [run for run in outcome.runs if run.compression == name]
        steps = np.array([point.step for point in runs[0].curve])
        loss = np.mean([[point.loss for point in run.curve] for run in runs], axis=0)
        style = {"label": name, "color": f"C{index}", "linestyle": ("-", "--", "-.")[index % 3]}
        over_steps.plot(steps, loss, **style)
        if runs[0].message_bytes_per_step:
            over_bytes.plot(steps * _megabytes(runs), loss, **style)

    over_steps.set(xlabel="step", ylabel="training loss (cross entropy)", yscale="log")
    over_bytes.set(xlabel="megabytes a rank has handed to Horovod", xscale="log")
    for axes in (over_steps, over_bytes):
        axes.grid(True, which="major", alpha=0.4)
    over_steps.legend(title="compression")
    what = outcome.configuration
    figure.suptitle(
        f"{what['model']} on {what['data']}, {what['framework']}, {outcome.ranks} ranks, "
        f"{what['batch_size']} samples a rank and step"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _megabytes(runs: list[Run]) -> float:
    return float(np.mean([run.message_bytes_per_step for run in runs])) / 1e6
