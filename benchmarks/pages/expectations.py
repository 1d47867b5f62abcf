"""The README's tables of what to expect: speeds, accuracies, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import numpy as np

from benchmarks.frontier.experiment import EXPERIMENTS as FRONTIERS
from benchmarks.frontier.points import by_optimizer, points
from benchmarks.frontier.tasks import LENET, MOMENTUM, RESNET, TEXT, Task
from benchmarks.intervals import Interval, mean, paired
from benchmarks.pages import bandwidth, papers, step_times, time_to_loss
from benchmarks.pages.reading import RECORDS, ratio, record, signed
from benchmarks.papers.experiment import choose, values
from benchmarks.papers.record import read
from benchmarks.tables import Table
from benchmarks.verdicts import SAME_BITS, SAME_POINTS, same

_FASTER = {
    "onebit": "`OneBit`",
    "powersgd:rank=4,warmup_steps=2": "PowerSGD, PyTorch's hook",
    "int8": "`Int8`",
    "fp16": "fp16",
}
_ALEXNET = {
    "Xeon": ("200 Mbit/s", "lab-alexnet-200mbit"),
    "the same": ("1 Gbit/s", "lab-alexnet-1gbit"),
    "Zen 4": ("1 Gbit/s", "lab-alexnet-1gbit-zen4"),
    "Zen 3": ("1 Gbit/s", "lab-alexnet-1gbit-zen3"),
}
_KERNELS = ("onebit", "int8", "ternary", "ecq")
_CODECS = ("int8", "ecq", "onebit")
_PAIRS = "onebit:exchange=two_shot"
_MNIST = "MNIST, LeNet (61,706), momentum, 5 workers"
_DENSE = "MNIST, four dense layers (134,794), momentum, 4 workers"
_RESNET = "digits, ResNet-20 (269,722), momentum, 5 workers"
_DIGITS, _TEXT = "digits, LeNet (61,706), ", "text, a transformer (470,784), "


def speed() -> Table:
    """How many times as fast as without compression a step is, by model and link."""
    lines = []
    for link, rate in bandwidth.LINKS.items():
        what, name = "DDP, a transformer (470,784), Zen 4", f"lab-ddp-gpt-{link}"
        lines.append(_gains(what, bandwidth.shown(rate), name, record(name)["seconds"]))
    for processor, (link, name) in _ALEXNET.items():
        what = f"Horovod, AlexNet (61 million), {processor}"
        lines.append(_gains(what, link, name, step_times.rounds(name)))
    header = ("training (parameters)", "link", "rounds", *_FASTER.values(), "record")
    return Table(header, lines, left=2)


def _gains(what: str, link: str, name: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    cells = (gain(seconds["none"], seconds[one]) if one in seconds else "" for one in _FASTER)
    return (what, link, str(len(seconds["none"])), *cells, f"`{name}`")


def gain(none: Sequence[float], own: Sequence[float]) -> str:
    """The geometric mean of ``none[i] / own[i]``, with its 95% interval, or both of two ratios."""
    ratios = np.divide(none, own)
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    if len(ratios) == 2:
        return "{:.2f} ({:.2f}, {:.2f})".format(geometric_mean(ratios), *ratios)
    found = mean(np.log(ratios))
    return ratio(np.exp([found.mean, found.low, found.high]))


def accuracy() -> Table:
    """The results of trainings without compression, and the differences to them with three codecs.

    Differences that count as none are bold.
    """
    lines = [
        _pairs(f"{_DIGITS}momentum", "accuracy"),
        _pairs("the same in TensorFlow", "accuracy-tensorflow"),
        _pairs(
            f"{_DIGITS}momentum, in two shots",
            "accuracy-exchanges",
            ecq="ecq:exchange=two_shot",
            onebit=_PAIRS,
        ),
        _frontier(_MNIST, LENET),
        _feedback(f"{_DENSE} in two shots", _PAIRS),
        _frontier(_RESNET, RESNET),
        _pairs(f"{_TEXT}momentum", "accuracy-text-momentum"),
        _pairs("the same with AdamW", "accuracy-text"),
        _pairs(
            "the same with `OneBitAdam`, 100 steps uncompressed",
            "accuracy-text-onebit-adam",
            onebit="onebit:warmup_steps=100",
        ),
        _pairs("the same with Muon", "accuracy-text-muon"),
        _frontier(f"{_TEXT}momentum, 4 workers", TEXT),
        _frontier("the same with AdamW", TEXT, "adamw"),
        _frontier("the same with Muon", TEXT, "muon"),
    ]
    codecs = ("`Int8`", "`ECQ`", "`OneBit`")
    header = ("training (parameters)", "steps", "seeds", "uncompressed", *codecs, "record")
    return Table(header, lines)


def onebit() -> Table:
    """The differences of :func:`accuracy` of all trainings on images with 1-bit SGD."""
    shared = "onebit:exchange=hierarchical"
    lines = [
        _pairs(f"{_DIGITS}momentum", "accuracy"),
        _pairs("the same in TensorFlow", "accuracy-tensorflow", int8="", ecq=""),
        _pairs(
            "hierarchically between two hosts of two ranks", "accuracy-hierarchical", onebit=shared
        ),
        _pairs("in two shots", "accuracy-exchanges", onebit=_PAIRS),
        _frontier(_MNIST, LENET),
        _feedback(_DENSE, "onebit"),
        _feedback("the same in two shots", _PAIRS),
        _frontier(_RESNET, RESNET),
    ]
    header = ("training (parameters)", "steps", "seeds", "uncompressed", "difference", "record")
    return Table(header, [(*line[:4], *line[6:]) for line in lines])


def _pairs(what: str, name: str, **named: str) -> tuple[str, ...]:
    """A line of a record of ``benchmarks.accuracy``; ``named`` are the compressions of codecs there."""
    found = record(name)
    of = {one["compression"]: one for one in found["compressions"]}
    rows = [of.get(named.get(codec, codec)) for codec in _CODECS]
    plain, bits, setting = of["none"], "test_bits" in of["none"], found["configuration"]
    steps = setting["steps"] or f"{setting['epochs']} epochs"
    seeds = " or ".join(map(str, sorted({row["seeds"] for row in rows if row})))
    ends = [row and Interval(row["difference"], row["high"] - row["difference"]) for row in rows]
    value = plain["test_bits" if bits else "test_accuracy"]
    return (what, f"{steps}", seeds, *_cells(value, ends, bits), f"`{name}`")


def _frontier(what: str, task: Task, optimizer: str = MOMENTUM) -> tuple[str, ...]:
    """A line of a record of ``benchmarks.frontier``."""
    name = FRONTIERS[task.name].name
    rows = by_optimizer(read(RECORDS / f"{name}.json").rows)[optimizer]
    of = {one.method: one for one in points(rows, task.measure)}
    value, seeds = of["none"].value, len(choose(rows, method="none"))
    assert value is not None
    ends = [of[one].difference if one in of else None for one in _CODECS]
    cells = _cells(value.mean, ends, task is TEXT)
    return (what, str(rows[0]["steps"]), str(seeds), *cells, f"`{name}`")


def _feedback(what: str, compression: str) -> tuple[str, ...]:
    """A line of 1-bit SGD's experiment on error feedback."""
    rows = papers.rows("onebit-feedback")
    plain, own = (
        100 * values(choose(rows, compression=one), "test_accuracy")
        for one in ("none", compression)
    )
    cells = _cells(float(plain.mean()), [None, None, paired(list(own), list(plain))], False)
    return (what, str(rows[0]["steps"]), str(len(plain)), *cells, "`papers-onebit-feedback`")


def _cells(value: float, differences: Sequence[Interval | None], bits: bool) -> list[str]:
    return [
        f"{value:.3f} bits" if bits else f"{value:.2f}%",
        *(_told(one, bits) for one in differences),
    ]


def _told(found: Interval | None, bits: bool) -> str:
    if found is None:
        return ""
    ends = (signed(one, 3 if bits else 2) for one in (found.mean, found.low, found.high))
    told = "{} ({} to {})".format(*ends)
    return f"**{told}**" if same(found, SAME_BITS if bits else SAME_POINTS) else told


def rest() -> Table:
    """Times to a loss, steps of a larger model, codes of four bits, and kernels."""
    times = {line[0].partition(",")[0]: line[4] for line in time_to_loss.table().rows}
    target = time_to_loss.TARGET
    large = {link: _large(f"lab-gpt2-{link}") for link in ("500mbit", "1gbit")}
    rotated = [_rotated(optimizer) for optimizer in (MOMENTUM, "adamw", "muon")]
    lines = [
        (
            f"time to a training loss of {target} bits a byte, AdamW, text, DDP on two hosts at 100 "
            "Mbit/s, as a share of uncompressed training's; steps of four seeds, the clock of one run",
            "; ".join(
                f"{shown} {times[name]}"
                for name, shown in (
                    ("ecq", "`ECQ`"),
                    ("int8", "`Int8`"),
                    ("powersgd", "PowerSGD, PyTorch's hook"),
                    ("bf16", "bf16"),
                    ("onebit", "`OneBit` after 75 uncompressed steps"),
                )
            ),
            "`train-text-losses`, `lab-text-100mbit`",
        ),
        (
            "times as fast as uncompressed: a transformer of 124 million parameters, DDP on two hosts at "
            "500 Mbit/s and 1 Gbit/s, one run of five steps each",
            "; ".join(
                f"{shown} {large['500mbit'][name]:.1f} and {large['1gbit'][name]:.1f}"
                for name, shown in (("ecq", "`ECQ`"), ("int8", "`Int8`"), ("bf16", "bf16"))
            ),
            "`lab-gpt2-*`",
        ),
        (
            "`ECQ(rotate=True, bucket=128)`, 4.26 bits an element, in the last three trainings above",
            "; ".join(
                f"{shown} {told}"
                for shown, told in zip(("momentum", "AdamW", "Muon"), rotated, strict=True)
            ),
            f"`{FRONTIERS[TEXT.name].name}`",
        ),
        (
            "kernels on one H200, 64 Mi elements: bytes a second as a share of a copy's, "
            "without casts and top-k",
            _kernels(),
            "`codec-h200`",
        ),
    ]
    return Table(("what was measured", "result", "records"), lines, left=3)


def _large(name: str) -> dict[str, float]:
    found = {run["compression"]: run["step_seconds"]["median"] for run in record(name)["runs"]}
    return {one: found["none"] / seconds for one, seconds in found.items()}


def _rotated(optimizer: str) -> str:
    rows = by_optimizer(read(RECORDS / f"{FRONTIERS[TEXT.name].name}.json").rows)[optimizer]
    of = {one.method: one.difference for one in points(rows, TEXT.measure)}
    return _told(of["ecq:rotate=True,bucket=128"], True)


def _kernels() -> str:
    rows = record("codec-h200")["sizes"][0]["codecs"]
    told = []
    for column, shown in (
        ("encode_with_feedback", "encoding with feedback"),
        ("encode", "without"),
        ("decode", "decoding one payload"),
        ("decode_64", "64 payloads"),
    ):
        shares = {
            name: row[column]["share_of_copy_bandwidth"]
            for name, row in rows.items()
            if row[column] is not None and "torch" not in name
        }
        own = [share for name, share in shares.items() if name.split()[0] in _KERNELS]
        top = shares["topk 64 of 4096"]
        told.append(f"{shown} {min(own):.2f} to {max(own):.2f} (top-k {top:.2f})")
    return "; ".join(told)
