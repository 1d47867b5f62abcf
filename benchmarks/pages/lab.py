"""Tables of records from the lab and from jobs on one machine: times, bytes and losses."""

from __future__ import annotations

import dataclasses
import math
import re
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks import predicted, results
from benchmarks.compressions import POWERSGD_HOOK
from benchmarks.intervals import paired
from benchmarks.pages.reading import RECORDS, label, middle_half, ratio, record, signed
from benchmarks.predict.profiles import PROFILES
from benchmarks.tables import Table
from hvd_compress.planner.machines import Link

_PAYLOAD = 0.956
"""The share of a link's rate that TCP over Ethernet leaves."""
_GPT2 = {"500 Mbit/s": ("lab-gpt2-500mbit", 500e6), "1 Gbit/s": ("lab-gpt2-1gbit", 1e9)}
"""For each link, the record and the bits per second."""
_LINKS = {"none": "not limited", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
_GRIDS = {2: ((1, 1), (2, 1), (1, 2)), 4: ((1, 1), (4, 1), (2, 2), (1, 4))}


def auto() -> Table:
    """``Auto`` beside fixed choices, by hosts and links."""
    header = (
        "hosts",
        "link",
        "`Auto` took",
        "its step, ms",
        "best fixed choice",
        "`Auto`'s time over the best's",
        "better of none and fp16",
        "over its",
        "planning, steps",
    )
    lines = []
    for hosts in (2, 4, 8):
        for link, name in _LINKS.items():
            found = record(f"lab-auto-{hosts}-{link}")
            told = found["explanation_at_the_end"]
            counted = _after(r", ([\d.]+) steps of the best plan", told)
            lines.append(
                (
                    str(hosts),
                    name,
                    _after(r"^\* +(.*?)  ", told),
                    f"{1e3 * median(found['seconds']['auto']):.0f}",
                    label(found["best"]),
                    ratio(found["ratio_to_best"]),
                    found["best_uncompressed"],
                    ratio(found["ratio_to_best_uncompressed"]),
                    f"{found['planning_steps']:.1f} ({counted})",
                )
            )
    return Table(header, lines, left=3)


def powersgd() -> Table:
    """PowerSGD's codec and PyTorch's hook in turns: medians of a step, and ratios to the hook's."""
    found = record("lab-ddp-powersgd-100mbit")
    seconds, processor = found["seconds"], found["processor_seconds"]
    names = {
        "none": "no compression",
        "powersgd:rank=4": "`PowerSGD`, rank 4",
        POWERSGD_HOOK: "PyTorch's hook, rank 4",
    }
    lines = [
        (
            shown,
            f"{1e3 * median(seconds[name]):.0f}",
            _over_hook(seconds, name),
            f"{1e3 * median(processor[name]):.0f}",
            _over_hook(processor, name),
        )
        for name, shown in names.items()
    ]
    header = ("ms a step", "time", "over the hook's", "processor time", "over the hook's")
    return Table(header, lines)


def _over_hook(times: dict[str, list[float]], name: str) -> str:
    if name == POWERSGD_HOOK:
        return ""
    logarithms = (list(np.log(times[one])) for one in (name, POWERSGD_HOOK))
    interval = paired(*logarithms)
    return ratio([math.exp(one) for one in (interval.mean, interval.low, interval.high)])


def _after(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"expected {pattern} in an explanation, got {text[:80]!r}")
    return found[1]


def text() -> Table:
    """Trainings of a transformer on two links: bytes, seconds and losses, means over the seeds."""
    lines = []
    for name, slow in _by_compression("lab-text-100mbit").items():
        fast = _by_compression("lab-text-1gbit")[name]
        lines.append(
            (
                label(name),
                f"{slow[0]['wire_bytes_per_step'] * slow[0]['steps'] / 1e6:.0f}",
                *(f"{fmean(one['train_seconds'] for one in runs):.0f}" for runs in (slow, fast)),
                f"{fmean(one['test_bits'] for one in slow):.3f}",
            )
        )
    header = ("compression", "MB sent", "at 100 Mbit/s, s", "at 1 Gbit/s, s", "test bits a byte")
    return Table(header, lines)


def large() -> Table:
    """A step of GPT-2's shape between two hosts on two links, and the predicted steps of two and eight."""
    lines: dict[str, list[str]] = {}
    sent: dict[str, list[str]] = {}
    for name, bits in _GPT2.values():
        outcome, profile = results.read(RECORDS / f"{name}.json"), PROFILES["lab"]
        between = Link(_PAYLOAD * bits / 8, profile.between.latency)
        profile = dataclasses.replace(profile, between=between)
        two, eight = (
            predicted.predictions(dataclasses.replace(outcome, ranks=ranks), profile)
            for ranks in (outcome.ranks, 8)
        )
        for run in outcome.runs:
            of = run.compression
            if of in two:
                told = (run.step_seconds.median, two[of].seconds, eight[of].seconds)
                lines.setdefault(of, []).extend(f"{one:.1f}" for one in told)
                bytes_sent = (run.wire_bytes_per_step, eight[of].exchange.sent)
                sent[of] = [f"{1e-6 * one:.0f}" for one in bytes_sent]
    times = [
        f"{link}: {what}" for link in _GPT2 for what in ("two, s", "predicted", "eight, predicted")
    ]
    header = ("compression", *times, "MB sent of two", "of eight")
    return Table(header, [(label(of), *lines[of], *sent[of]) for of in lines])


def _by_compression(name: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in record(name)["runs"]:
        found.setdefault(run["compression"], []).append(run)
    return found


def gradients() -> Table:
    """Exchanges of AlexNet's gradients between eight hosts."""
    first, second = (record(name)["rows"] for name in ("lab-gradients-8", "lab-gradients-8-onebit"))
    # Each is compared with two_shot in the same run.
    rows = [(one, second) for one in second]
    rows += [(one, first) for one in first if one["compression"] == "fp16"]
    lines = []
    for one, run in rows:
        seconds = one["seconds"]["median"]
        shots = next(r for r in run if "two_shot" in r["compression"])["seconds"]["median"]
        coding = [one["encode_seconds"], one["decode_seconds"]]
        lines.append(
            (
                label(one["compression"]),
                f"{one['wire_bytes'] / 1e6:.1f}",
                f"{seconds:.2f}",
                *(f"{part:.2f}" if part else "" for part in coding),
                f"{8e-6 * one['wire_bytes'] / seconds:.0f}",
                f"{seconds / shots:.1f}" if seconds > shots else "",
            )
        )
    header = ("exchange", "MB sent", "seconds", "encode", "decode", "Mbit/s sent")
    return Table((*header, "times two shots'"), lines)


def reduce_scatter() -> Table:
    """FSDP2's reduce-scatter beside compressed ones: means of the seeds' medians, and their ranges."""
    lines: dict[str, list[str]] = {}
    for link in ("100mbit", "500mbit"):
        runs = record(f"lab-fsdp-{link}")["runs"]
        names = dict.fromkeys(one["compression"] for one in runs)
        times = {
            name: [1e3 * r["step_seconds"]["median"] for r in runs if r["compression"] == name]
            for name in names
        }
        stock = fmean(next(iter(times.values())))
        for name, own in times.items():
            gain = "" if fmean(own) == stock else f"{stock / fmean(own):.2f}"
            cells = (f"{fmean(own):.0f} ({min(own):.0f} to {max(own):.0f})", gain)
            lines.setdefault(name, []).extend(cells)
    header = ("reduce-scatter", "100 Mbit/s", "times as fast", "500 Mbit/s", "times as fast")
    return Table(header, [(label(name), *cells) for name, cells in lines.items()])


def all_gather() -> Table:
    """FSDP2's gathers of parameters beside compressed ones: bytes, and losses paired by seed."""
    bits: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    for one in record("train-fsdp-gathers")["runs"]:
        bits.setdefault(one["compression"], []).append(one["test_bits"])
        sent[one["compression"]] = one["wire_bytes_per_step"]
    (stock, plain), *_ = bits.items()
    lines = []
    for name, own in bits.items():
        cells = ["", "", ""]
        if name != stock:
            found = paired(own, plain)
            ends = (signed(end, 3) for end in (found.low, found.high))
            cells = [f"{sent[name]:,.0f}", signed(found.mean, 3), " to ".join(ends)]
        lines.append((label(name), cells[0], f"{fmean(own):.3f}", *cells[1:]))
    return Table(
        ("compression", "bytes sent a step", "test bits a byte", "difference", "95% interval"),
        lines,
    )


def diloco() -> Table:
    """The share of time in which a rank of DiLoCo computes on a slow link."""
    local, *others = record("lab-diloco-50mbit")["runs"]
    lines = [_diloco(local, None), *(_diloco(one, local["train_seconds"]) for one in others)]
    return Table(("exchange", "seconds", "computes", "MB sent", "test bits a byte"), lines)


def _diloco(one: dict[str, Any], computing: float | None) -> tuple[str, ...]:
    shares = ("", "")
    if computing is not None:
        sent = one["wire_bytes_per_step"] * one["steps"] / 1e6
        shares = (f"{computing / one['train_seconds']:.1%}", f"{sent:.1f}")
    seconds, bits = f"{one['train_seconds']:.1f}", f"{one['test_bits']:.3f}"
    return (label(one["compression"]), seconds, *shares, bits)


def double_buffering() -> Table:
    """Half-batches beside whole ones at 50 Mbit/s, as in 1-bit SGD's table 4."""
    published = {2048: "1.00 (2k, 2.8k)", 4096: "1.06 (4k)"}
    lines = [
        (
            f"{one['batch']:,}",
            *(f"{1e3 * one['seconds'][way]:.0f}" for way in ("whole", "halves")),
            ratio(one["gain"]),
            published.get(one["batch"], ""),
        )
        for one in record("lab-double-buffering-50mbit")["rows"]
    ]
    lines.append(("larger", "not measured", "", "", "1.08 (8k) to 1.21 (32k)"))
    header = ("samples in a minibatch", "whole, ms", "halves, ms", "times as fast", "published")
    return Table(header, lines)


def grid(hosts: int) -> Table:
    """Layouts of data and model parallelism: thousands of samples per second, and ratios to one rank's."""
    rows = record(f"lab-grid-{hosts}-200mbit")["rows"]
    found = {(tuple(one["layout"]), one["batch"], one["kind"]): one for one in rows}
    columns = [(batch, kind) for batch in (256, 2048) for kind in ("32 bits", "encoded")]
    lines = []
    for layout in _GRIDS[hosts]:
        cells = []
        for batch, kind in columns:
            one = found.get((layout, batch, kind))
            speed = "" if one is None else f"{batch / one['seconds'] / 1e3:.1f}"
            alone = layout == (1, 1) or one is None
            cells.append(speed if alone else f"{speed} ({1 / one['ratio'][0]:.2f})")  # type: ignore[index]
        lines.append(("{} × {}".format(*layout), *cells))
    header = ("data × model", *(f"{batch:,} samples: {kind}" for batch, kind in columns))
    return Table(header, lines)


def overhead() -> Table:
    """The ratios of steps of 54 tensors to stock's in the same round."""
    names = ("onebit", "int8", "onebit:exchange=two_shot")
    lines = [
        (
            f"{frontend}, {processor}",
            *(_over_stock(f"overhead-{name}", choice) for choice in names),
        )
        for name, frontend, processor in (
            ("torch", "Horovod", "Zen 4"),
            ("torch-zen3", "Horovod", "Zen 3"),
            ("ddp", "DDP", "Zen 4"),
            ("ddp-zen3", "DDP", "Zen 3"),
        )
    ]
    return Table(("", "1-bit, allgather", "int8, allgather", "1-bit, two shots"), lines)


def models() -> Table:
    """The ratios of models' steps to stock's in the same round."""
    lines = [
        (what, *(_over_stock(name, choice, clock) for choice in ("onebit", "int8")))
        for what, name, clock in (
            ("ResNet-20, Horovod and PyTorch, Zen 4", "overhead-resnet20", 0),
            (
                "the same, processor time of the thread that computes",
                "overhead-resnet20",
                1,
            ),
            ("ResNet-20, Horovod and PyTorch, Zen 3", "overhead-resnet20-zen3", 0),
            ("ResNet-20, Horovod and TensorFlow, Zen 4", "steps-resnet20", 0),
            ("ResNet-20, Horovod and TensorFlow, Zen 3", "steps-resnet20-zen3", 0),
            ("the transformer, Horovod and PyTorch, Zen 4", "overhead-transformer", 0),
        )
    ]
    return Table(("", "1-bit", "int8"), lines)


def _over_stock(name: str, choice: str, clock: int = 0) -> str:
    """The median and the middle half of the ratios; ``clock`` is 0 for wall-clock, 1 for processor time."""
    rows = record(name)["rows"]
    rounds = zip(rows[choice]["rounds"], rows["stock"]["rounds"], strict=True)
    return middle_half([own[clock] / stock[clock] for own, stock in rounds])


def churn() -> Table:
    """Jobs whose ranks are killed, stopped, added and removed."""
    kinds = ("kill", "stop", "add", "remove")
    lines = [
        (
            job["compression"],
            f"{job['steps']:,}",
            *(f"{job['events'][kind]} ({job['recovery'][kind]:.1f} s)" for kind in kinds),
            "-" if job["missing"] is None else f"{job['missing']:.0e}",
            f"{job['sent']:.3f}",
            f"{job['growth'] / 1e6:+.1f}",
            str(len(job["problems"])),
        )
        for job in record("churn")["jobs"]
    ]
    header = ("compression", "steps", *kinds, "missing", "sent", "memory, MB", "problems")
    return Table(header, lines)
