"""The README's tables of what to expect: speeds, accuracies, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

import numpy as np

from benchmarks.frontier.experiment import EXPERIMENTS as FRONTIERS
from benchmarks.frontier.points import by_optimizer, points
from benchmarks.frontier.tasks import LENET, MOMENTUM, RESNET, TEXT, Task
from benchmarks.intervals import Interval, mean, paired
from benchmarks.pages import bandwidth, papers, step_times, time_to_loss
from benchmarks.pages.reading import RECORDS, ratio, record, signed
from benchmarks.papers.experiment import choose, kinds, values
from benchmarks.papers.record import read
from benchmarks.tables import Table
from benchmarks.trained import record as trained
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
_HEADER = ("training (parameters)", "steps", "seeds", "uncompressed")
_ROTATED = "ecq:rotate=True,bucket=128,alpha=0.01"
_SHOTS = "onebit:exchange=two_shot"
_CODECS = {
    "`Int8`": ("int8",),
    "`ECQ`": ("ecq", "qsgd:bucket=512"),
    "`ECQ(bucket=4096)`, `alpha=0.01`": (
        "ecq:bucket=4096,alpha=0.01",
        "ecq:exchange=two_shot,bucket=4096,alpha=0.01",
    ),
    "`OneBit`": ("onebit", _SHOTS),
}
"""The names of codecs in records; ``ECQ()`` is ``QSGD()``, in buckets of 512 and without feedback."""
_MNIST = "MNIST, LeNet (61,706), momentum, 5 workers"
_DENSE = "MNIST, four dense layers (134,794), momentum, 4 workers"
_RESNET = "digits, ResNet-20 (269,722), momentum, 5 workers"
_TRAINED = "text, a transformer (377,728), AdamW, 4 workers in two shots"
_DIGITS, _TEXT = "digits, LeNet (61,706), ", "text, a transformer (470,784), "


def speed() -> Table:
    """The speed of a step relative to one without compression, by model and link."""
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
    return ratio(np.exp([found.mean, found.low, found.high]).tolist())


def accuracy() -> Table:
    """The results of trainings without compression, and the differences to them with some codecs.

    Differences that count as none are bold.
    """
    lines = [
        _line(f"{_DIGITS}momentum", _recipe("accuracy")),
        _line("the same in TensorFlow", _recipe("accuracy-tensorflow")),
        _line(f"{_DIGITS}momentum, in two shots", _recipe("accuracy-exchanges")),
        _line(_MNIST, _frontier(LENET)),
        _line(f"{_DENSE} in two shots", _feedback(), (None, None, None, _SHOTS)),
        _line(_RESNET, _frontier(RESNET)),
        _line(f"{_TEXT}momentum", _recipe("accuracy-text-momentum")),
        _line("the same with AdamW", _recipe("accuracy-text")),
        _line(
            "the same with `OneBitAdam`, 100 steps uncompressed",
            _recipe("accuracy-text-onebit-adam"),
            (None, None, None, "onebit:warmup_steps=100"),
        ),
        _line("the same with Muon", _recipe("accuracy-text-muon")),
        _line(f"{_TEXT}momentum, 4 workers", _frontier(TEXT)),
        _line("the same with AdamW", _frontier(TEXT, "adamw")),
        _line("the same with Muon", _frontier(TEXT, "muon")),
        _line(_TRAINED, *_trained()),
    ]
    return Table((*_HEADER, *_CODECS, "record"), lines)


def onebit() -> Table:
    """All trainings on images with 1-bit SGD, with the differences of :func:`accuracy`."""
    hosts = "the same between two hosts of two ranks, hierarchical"
    hierarchical = ("onebit:exchange=hierarchical",)
    lines = [
        _line(f"{_DIGITS}momentum", _recipe("accuracy"), ("onebit",)),
        _line("the same in TensorFlow", _recipe("accuracy-tensorflow"), ("onebit",)),
        _line(hosts, _recipe("accuracy-hierarchical"), hierarchical),
        _line(f"{_DIGITS}momentum, in two shots", _recipe("accuracy-exchanges"), (_SHOTS,)),
        _line(_MNIST, _frontier(LENET), ("onebit",)),
        _line(_DENSE, _feedback(), ("onebit",)),
        _line("the same in two shots", _feedback(), (_SHOTS,)),
        _line(_RESNET, _frontier(RESNET), ("onebit",)),
    ]
    return Table((*_HEADER, "difference", "record"), lines)


@dataclass(frozen=True)
class _Trainings:
    """Trainings of a record.

    Attributes:
        record: the record's name.
        steps: the length of each training.
        plain: the mean result without compression, in bits or per cent.
        bits: whether results are bits a byte.
        differences: the differences to the trainings without compression, and their number, by compression.
    """

    record: str
    steps: str
    plain: float
    bits: bool
    differences: dict[str, tuple[Interval, int]]


def _line(
    what: str, found: _Trainings, columns: Sequence[str | None] | None = None
) -> tuple[str, ...]:
    """A line with the differences of some compressions; by default, the first of each codec's names."""
    if columns is None:
        names = _CODECS.values()
        columns = [next((n for n in own if n in found.differences), None) for own in names]
    chosen = [None if one is None else found.differences[one] for one in columns]
    seeds = " or ".join(map(str, sorted({one[1] for one in chosen if one})))
    plain = f"{found.plain:.3f} bits" if found.bits else f"{found.plain:.2f}%"
    cells = ("" if one is None else _told(one[0], found.bits) for one in chosen)
    return (what, found.steps, seeds, plain, *cells, f"`{found.record}`")


def _recipe(name: str) -> _Trainings:
    """A record of ``benchmarks.accuracy``."""
    found = record(name)
    rows, setting = found["compressions"], found["configuration"]
    plain = next(row for row in rows if row["compression"] == found["baseline"])
    measure = "test_bits" if "test_bits" in plain else "test_accuracy"
    differences = {
        row["compression"]: (
            Interval(row["difference"], row["high"] - row["difference"]),
            row["seeds"],
        )
        for row in rows
    }
    steps = str(setting["steps"] or f"{setting['epochs']} epochs")
    return _Trainings(name, steps, plain[measure], measure == "test_bits", differences)


def _frontier(task: Task, optimizer: str = MOMENTUM) -> _Trainings:
    """A record of ``benchmarks.frontier``."""
    name = FRONTIERS[task.name].name
    rows = by_optimizer(read(RECORDS / f"{name}.json").rows)[optimizer]
    found, seeds = points(rows, task.measure), len(choose(rows, method="none"))
    differences = {one.method: (one.difference, seeds) for one in found if one.difference}
    plain = fmean(task.measure.scale * values(choose(rows, method="none"), task.measure.key))
    return _Trainings(name, str(rows[0]["steps"]), plain, task is TEXT, differences)


def _trained() -> tuple[_Trainings, tuple[str | None, ...]]:
    """The record of ``benchmarks.trained``, and its methods of several seeds by column."""
    found = trained.read(RECORDS / "trained.json")
    results = trained.by_method(found)
    own = {name: trained.differences(found, name) for name in results}
    differences = {name: (mean(one), len(one)) for name, one in own.items() if len(one) > 1}
    plain = fmean(one["test_bits"] for one in results[trained.BASELINE].values())
    trainings = _Trainings("trained", str(found["recipe"]["steps"]), plain, True, differences)
    columns = ("int8", "qsgd", "ecq", "onebit")
    return trainings, tuple(name if name in differences else None for name in columns)


def _feedback() -> _Trainings:
    """The record of 1-bit SGD's experiment on error feedback."""
    rows = papers.rows("onebit-feedback")
    results = {
        name: 100 * values(choose(rows, compression=name), "test_accuracy")
        for name in kinds(rows, "compression")
    }
    plain = results["none"]
    differences = {
        name: (paired(own.tolist(), plain.tolist()), len(own)) for name, own in results.items()
    }
    steps = str(rows[0]["steps"])
    return _Trainings("papers-onebit-feedback", steps, fmean(plain), False, differences)


def _told(found: Interval, bits: bool) -> str:
    ends = (signed(one, 3 if bits else 2) for one in (found.mean, found.low, found.high))
    told = "{} ({} to {})".format(*ends)
    return f"**{told}**" if same(found, SAME_BITS if bits else SAME_POINTS) else told


def rest() -> Table:
    """Times to a loss, steps of a larger model, codes of four bits, and kernels."""
    methods = time_to_loss.methods()
    large = {link: _large(f"lab-gpt2-{link}") for link in ("500mbit", "1gbit")}
    rotated = [_rotated(optimizer) for optimizer in (MOMENTUM, "adamw", "muon")]
    lines = [
        (
            f"time to a test loss of {time_to_loss.TARGET} bits a byte in the last training above, DDP on "
            f"four hosts at {' and '.join(time_to_loss.LINKS)}, as a share of uncompressed training's",
            "; ".join(
                f"{shown} {' and '.join(_shares(methods, name))}"
                for name, shown in (
                    ("int8", "`Int8`"),
                    ("qsgd", "`ECQ`"),
                    ("powersgd:rank=16", "`PowerSGD(rank=16)`"),
                    ("fp16", "fp16"),
                    ("bf16", "bf16"),
                )
            ),
            "`trained`, `lab-time-to-loss-*`",
        ),
        (
            "times as fast as uncompressed: a transformer of 124 million parameters, DDP on two hosts at "
            "500 Mbit/s and 1 Gbit/s, one run of five steps each",
            "; ".join(
                f"{shown} {large['500mbit'][name]:.1f} and {large['1gbit'][name]:.1f}"
                for name, shown in (
                    ("ecq:bucket=4096,alpha=0.01", "`ECQ(bucket=4096)`, `alpha=0.01`"),
                    ("int8", "`Int8`"),
                    ("bf16", "bf16"),
                )
            ),
            "`lab-gpt2-*`",
        ),
        (
            "`ECQ(rotate=True, bucket=128)` with `alpha=0.01`, 4.26 bits an element, in the last three "
            "trainings above",
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


def _shares(methods: Mapping[str, time_to_loss.Method], method: str) -> list[str]:
    baseline = methods[trained.BASELINE]
    return [ratio(methods[method].share(baseline, link)) for link in time_to_loss.LINKS]


def _large(name: str) -> dict[str, float]:
    found = {run["compression"]: run["step_seconds"]["median"] for run in record(name)["runs"]}
    return {one: found["none"] / seconds for one, seconds in found.items()}


def _rotated(optimizer: str) -> str:
    return _told(_frontier(TEXT, optimizer).differences[_ROTATED][0], True)


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
