"""Makes the figures and tables of docs/perfmodel.md: ``python -m benchmarks.predict.figures OUT``.

The documentation's configuration calls :func:`main`, so that the page agrees with the model.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import figure
from benchmarks.predict import __main__ as command
from benchmarks.predict import sweep as sweeping
from benchmarks.predict.hardware import Profile
from benchmarks.predict.jobs import Job, Row, sweep
from benchmarks.predict.networks import NETWORKS
from benchmarks.predict.profiles import load
from benchmarks.predict.published import AppendixB, pulled_bits
from hvd_compress.codecs import CODECS
from hvd_compress.exchanges.routing import Route

UP_TO_512 = [2**power for power in range(10)]
UP_TO_131072 = [2**power for power in range(18)]

PAPER_BITS = {"none": "32 bits", "ternary": "log2(1 + 2N) bits", "ecq": "0.4 bits"}
"""The labels of the papers' bits per element; see :func:`paper_bits`."""

TITLES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "vgg_a": "VGG-A", "resnet50": "ResNet-50"}
CURVES = {
    ("none", "allreduce"): ("fp32 allreduce", "C0", "-"),
    ("fp16", "allreduce"): ("fp16 allreduce", "C1", "--"),
    ("two_shot", "compressed"): ("{codec}, two_shot", "C2", "-"),
    ("hierarchical", "compressed"): ("{codec}, hierarchical", "C3", "-."),
    ("allgather", "compressed"): ("{codec}, allgather", "C4", ":"),
}

ECQ_IMAGES = {"vanilla SGD": 27_280.0, "ECQ-SGD": 66_420.0}
"""Images a second on 512 GPUs: ECQ-SGD, section 6.3."""


def main(out: Path) -> None:
    """Writes all figures and tables into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    figure5(out)
    figure6(out)
    far(out)
    (out / "perfmodel-example.txt").write_text(example())
    (out / "perfmodel-papers.md").write_text(papers_table())
    (out / "perfmodel-512.md").write_text(table_512())
    (out / "perfmodel-far.md").write_text(table_far())


EXAMPLE = (
    "--model docs/examples/alexnet.json --compute 143ms --batch 128 --workers 1,4,8,64,512"
    " --codec none fp16 onebit --exchange two_shot allgather --link 1gbit --local 4 --machine gpu"
)


def example() -> str:
    """The output of the page's first command."""
    printed = io.StringIO()
    root = Path(__file__).parent.parent.parent
    with contextlib.chdir(root), contextlib.redirect_stdout(printed):
        command.main(EXAMPLE.split())
    return printed.getvalue()


def route(scheme: str, exchange: str = "two_shot") -> Route:
    """The route of a codec with its default feedback."""
    return Route(CODECS[scheme](), exchange=exchange)


def routes(scheme: str, *exchanges: str) -> list[Route]:
    """The routes of fp32, of fp16, and of a codec through each exchange."""
    return [route("none"), route("fp16"), *(route(scheme, exchange) for exchange in exchanges)]


def job(profile: str, network: str, **options: Any) -> Job:
    """A network's job on a profile's machines, by default with the profile's images per worker."""
    return sweeping.job(NETWORKS[network](), load(profile), **options)


def paper_bits(scheme: str, workers: int) -> float:
    """The bits per element that the papers count.

    TernGrad's are those of sums over all workers: appendix B sums along a tree, with one size for all
    messages. ECQ-SGD's are 80 times fewer than float32's (section 6.2).
    """
    return {"none": 32.0, "ternary": pulled_bits(workers), "ecq": 32 / 80}[scheme]


def appendix_b(profile: Profile) -> AppendixB:
    """TernGrad's model with a profile's links, and PCIe 3.0 between GPUs and processor."""
    return AppendixB(
        profile.within.bandwidth, 1.575e10, profile.between.bandwidth, profile.between.latency
    )


def appendix_b_images(work: Job, bits: float, workers: int) -> float:
    """The images per second by the paper's model, with weak scaling.

    Args:
        work: the job.
        bits: the bits per element that are sent.
        workers: the number of GPUs.
    """
    cluster = work.profile.cluster(workers)
    alone = work.step(route("none"), 1).computation
    size = work.network.elements * bits / 8
    return (
        workers
        * work.batch
        / appendix_b(work.profile).weak(cluster.hosts, cluster.local, alone, size)
    )


def figure5(out: Path) -> None:
    """Draws three networks on both of TernGrad's clusters."""
    path = out / "perfmodel-figure5.svg"
    with figure(path, 2, 3, size=(11, 6.4), sharex=True) as grid:
        for line, profile in zip(grid, ("terngrad_ethernet", "terngrad_infiniband"), strict=True):
            for axes, network in zip(line, ("alexnet", "googlenet", "vgg_a"), strict=True):
                work = job(profile, network)
                _draw(
                    axes,
                    sweep(work, routes("ternary", "two_shot", "hierarchical"), UP_TO_512),
                    "ternary",
                )
                _draw_appendix_b(axes, work, "ternary")
                link = (
                    "1 Gbit/s Ethernet"
                    if profile == "terngrad_ethernet"
                    else "100 Gbit/s InfiniBand"
                )
                axes.set_title(f"{TITLES[network]}, {link}")
                axes.set_xlabel("GPUs" if profile == "terngrad_infiniband" else "")
        _finish(grid)


def figure6(out: Path) -> None:
    """Draws ResNet-50 on ECQ-SGD's cluster, with the two numbers that the paper gives."""
    with figure(out / "perfmodel-figure6.svg", size=(6.4, 4.2)) as ((axes,),):
        work = job("ecq", "resnet50")
        _draw(axes, sweep(work, routes("ecq", "two_shot", "hierarchical"), UP_TO_512), "ecq")
        _draw_appendix_b(axes, work, "ecq")
        for (name, rate), marker in zip(ECQ_IMAGES.items(), "sD", strict=True):
            axes.plot([512], [rate], marker, color="k", markersize=5, label=f"paper, {name}")
        axes.set(title="ResNet-50, 40 Gbit/s Ethernet", xlabel="GPUs")
        axes.legend()


def _draw_appendix_b(axes: Any, work: Job, scheme: str) -> None:
    """Draws the images a second by the paper's model, without compression and with a scheme."""
    for name, style in (("none", (0, (1, 1))), (scheme, (0, (4, 1, 1, 1)))):
        images = [appendix_b_images(work, paper_bits(name, k), k) for k in UP_TO_512]
        label = f"appendix B, {PAPER_BITS[name]}"
        axes.plot(UP_TO_512, images, color="0.45", linestyle=style, linewidth=1, label=label)


def far(out: Path) -> None:
    """Draws the speed-up per GPU of all four networks on the InfiniBand cluster, up to 131,072 GPUs."""
    with figure(out / "perfmodel-far.svg", 1, 4, size=(12, 3.6), sharey=True) as grid:
        for axes, network in zip(grid[0], TITLES, strict=True):
            rows = sweep(
                job("terngrad_infiniband", network),
                routes("onebit", "two_shot", "hierarchical", "allgather"),
                UP_TO_131072,
            )
            _draw(axes, rows, "onebit", efficiency=True)
            axes.set(title=TITLES[network], xlabel="GPUs", yscale="linear", ylabel="")
            axes.set_ylim(0, 1.03)
        grid[0][0].set_ylabel("speed-up over one GPU, per GPU")
        _finish(grid)


def papers_table() -> str:
    """The table of the papers' speed-ups beside both models'.

    The last column but one solves ``step + communication(32) = ratio * (step + communication(bits))``: the
    step of a single GPU for which appendix B gives the paper's speed-up.
    """
    lines = (
        (
            "TernGrad, figure 5 (a): AlexNet, 8 GPUs, 1 Gbit/s",
            3.04,
            "alexnet",
            "terngrad_ethernet",
            8,
        ),
        (
            "TernGrad, figure 5 (b): VGG-A, 512 GPUs, 100 Gbit/s",
            2.0,
            "vgg_a",
            "terngrad_infiniband",
            512,
        ),
        ("ECQ-SGD, figure 6: ResNet-50, 512 GPUs, 40 Gbit/s", 2.435, "resnet50", "ecq", 512),
    )
    columns = (
        "speed-up",
        "paper",
        "appendix B",
        "ours, two_shot",
        "ours, hierarchical",
        "ours, fp16",
        "step that the paper implies",
        "step of the profile",
    )
    table = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for what, said, network, profile, workers in lines:
        work, cluster = job(profile, network), load(profile).cluster(workers)
        scheme = "ecq" if profile == "ecq" else "ternary"
        bits = paper_bits(scheme, workers)
        paper = appendix_b_images(work, bits, workers) / appendix_b_images(work, 32, workers)
        rows = sweep(work, routes(scheme, "two_shot", "hierarchical"), [workers])
        plain, *others = (row.images_per_second for row in rows)
        half, two, hosts = (rate / plain for rate in others)
        whole, small = (
            appendix_b(work.profile).weak(
                cluster.hosts, cluster.local, 0.0, work.network.elements * width / 8
            )
            for width in (32, bits)
        )
        implied = (whole - said * small) / (said - 1)
        ratios = " | ".join(f"{ratio:.2f}" for ratio in (paper, two, hosts, half))
        alone = work.step(route("none"), 1).computation
        table.append(
            f"| {what} | {said:g} | {ratios} | {1e3 * implied:,.0f} ms | {1e3 * alone:,.0f} ms |"
        )
    return "\n".join(table) + "\n"


def table_512() -> str:
    """The table of all networks on 512 GPUs."""
    table = [
        "| network, link | fp32 | fp16 | ternary, two_shot | ternary, hierarchical | no exchange |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for profile, network in (
        ("terngrad_ethernet", "alexnet"),
        ("terngrad_ethernet", "googlenet"),
        ("terngrad_ethernet", "vgg_a"),
        ("terngrad_infiniband", "alexnet"),
        ("terngrad_infiniband", "googlenet"),
        ("terngrad_infiniband", "vgg_a"),
        ("ecq", "resnet50"),
    ):
        work = job(profile, network)
        rows = sweep(work, routes("ternary", "two_shot", "hierarchical"), [512])
        limit = 512 * work.batch / rows[0].step.computation
        cells = [_images(row) for row in rows] + [f"{limit:,.0f}"]
        bits = work.profile.between.bandwidth * 8 / 1e9
        table.append(f"| {TITLES[network]}, {bits:g} Gbit/s | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def table_far() -> str:
    """The table of AlexNet and ResNet-50 by orders of magnitude."""
    counts = (8, 512, 4096, 32768, 131072)
    table = [
        "| GPUs | "
        + " | ".join(
            f"{TITLES[n]}, {c}" for n in ("alexnet", "resnet50") for c in ("fp32", "fp16", "1-bit")
        )
        + " |",
        "| ---: |" + " ---: |" * 6,
    ]
    columns = [
        sweep(job("terngrad_infiniband", network), routes("onebit", "two_shot"), counts)
        for network in ("alexnet", "resnet50")
    ]
    for index, count in enumerate(counts):
        rows = [rows[index + start * len(counts)] for rows in columns for start in range(3)]
        cells = [f"{row.speedup / count:.0%}{'*' if row.refused else ''}" for row in rows]
        table.append(f"| {count:,} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def _images(row: Row) -> str:
    return f"{row.images_per_second:,.0f}" + ("*" if row.refused else "")


def _draw(axes: Any, rows: Sequence[Row], codec: str, *, efficiency: bool = False) -> None:
    for rows_of in _curves(rows):
        head = rows_of[0]
        key = (
            (("none" if head.codec.startswith("No") else "fp16"), "allreduce")
            if head.exchange == "allreduce"
            else (head.exchange, "compressed")
        )
        label, color, style = CURVES[key]
        able = [row for row in rows_of if not row.refused]
        unable = [*able[-1:], *(row for row in rows_of if row.refused)]
        for part, alpha, shown in ((able, 1.0, label.format(codec=codec)), (unable, 0.3, "_")):
            axes.plot(
                [row.workers for row in part],
                [
                    row.speedup / row.workers if efficiency else row.images_per_second
                    for row in part
                ],
                style,
                color=color,
                alpha=alpha,
                label=shown,
                linewidth=1.4,
            )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", ylabel="images a second")
    axes.grid(True, alpha=0.3)


def _curves(rows: Sequence[Row]) -> Iterable[list[Row]]:
    for key in dict.fromkeys((row.codec, row.exchange) for row in rows):
        yield [row for row in rows if (row.codec, row.exchange) == key]


def _finish(grid: Any) -> None:
    """Adds one legend below all panels, which have the same curves."""
    handles, labels = grid.flat[0].get_legend_handles_labels()
    grid.flat[0].figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    for axes in grid.flat:
        if axes.get_subplotspec().colspan.start:
            axes.set_ylabel("")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
