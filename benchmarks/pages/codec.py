"""Tables of the codecs' times, errors and bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import numpy as np

from benchmarks.models.torch import build
from benchmarks.pages.reading import record
from benchmarks.papers.entropy import Histogram
from benchmarks.papers.int8_errors import KINDS, RELATIVE
from benchmarks.papers.native import Native
from benchmarks.tables import Table
from hvd_compress.codecs import ECQ, NoiseKey

_MEASURED = ("encode", "encode_with_feedback", "decode")
_AIMS = {
    1.5: ("onebit 1024", "onebit 2048", "int8 linear 2048"),
    2.0: ("int8 dynamic 2048", "int8 static", "int8 mantissa", "ternary 2048", "ecq linf 2048"),
    2.25: ("onebit tensor", "int8 linear tensor"),
    2.3: ("ecq l2 4096", "ecq l2 2048"),
    2.75: ("int8 dynamic tensor",),
    3.0: ("onebit column",),
    3.25: ("ternary tensor", "ecq l2 tensor"),
}
_DIGITS = {1.5: 1, 2.0: 1, 2.3: 1, 3.0: 1}


def two_cores() -> Table:
    """Multiples of a copy's time, beside the aims and an older measurement."""
    found, before = record("codec-cpu-zen5")["codecs"], record("codec-cpu")["codecs"]
    aims = {name: aim for aim, names in _AIMS.items() for name in names}
    lines = []
    for name, row in found.items():
        copies = [_copies(row[one]) for one in _MEASURED]
        feedback, aim = row["encode_with_feedback"], aims.get(name)
        old = before.get(name, {}).get("encode_with_feedback")
        lines.append(
            (
                name,
                f"{row['bits_per_element']:.3f}",
                *copies[:2],
                "" if aim is None else f"{aim:.{_DIGITS.get(aim, 2)}f}",
                "" if feedback is None else f"{feedback['ns_per_element']:.2f}",
                "" if feedback is None else f"{feedback['bandwidth']:.0%}",
                *copies[2:],
                _copies(old),
            )
        )
    header = ("codec", "bits an element", "encode", "encode with feedback", "aim", "ns")
    return Table((*header, "of a triad", "decode", "Xeon, before"), lines)


def entropy() -> Table:
    """Multiples of a copy's time, with an entropy code and without."""
    lines = [
        (name, f"{row['bits_per_element']:.3f}", *(_copies(row[one]) for one in _MEASURED))
        for name, row in record("codec-entropy-zen4")["codecs"].items()
    ]
    names = (one.replace("_", " ") for one in _MEASURED)
    return Table(("codec", "bits an element", *names), lines)


def _copies(measured: dict[str, float] | None) -> str:
    return "" if measured is None else f"{measured['copies']:.2f}"


def int8_errors() -> Table:
    """Mean relative errors in per cent, with the paper's in parentheses."""
    rows = record("papers-int8-errors")["rows"]
    lines = []
    for name in ("U(0, 1)", "N(0, 1)"):
        own = [one["result"] for one in rows if one["distribution"] == name]
        ours = [fmean(one[kind]["nearest"]["relative_percent"] for one in own) for kind in KINDS]
        cells = (f"{x:.2f} ({y:g})" for x, y in zip(ours, RELATIVE[name], strict=True))
        lines.append((f"${name}$", *cells))
    return Table(("numbers", *(f'`"{kind}"`' for kind in KINDS)), lines)


def normal() -> Table:
    """Bits per element of a million normally distributed numbers, computed here, not from a record."""
    x = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    lines = []
    for settings, levels, norm in (
        ('`levels=1, norm="l2"`', 1, "l2"),
        ('`levels=4, norm="l2"`', 4, "l2"),
        ("`levels=4`", 4, "linf"),
        ("`levels=7`", 7, "linf"),
    ):
        plain, coded = (_histogram(levels, norm, way, [x]) for way in ("plain", "entropy"))
        bits = (plain.packed_bits, coded.packed_bits, coded.coded_bits)
        lines.append((settings, *(f"{one:.3f}" for one in bits)))
    return Table(("setting", "plain", "entropy coded", "entropy plus scales"), lines)


def noise() -> Table:
    """The compression of noise in ResNet-20's shapes with ECQ-SGD's settings, computed here."""
    rng = np.random.default_rng(0)
    shapes = [tuple(p.shape) for p in build("resnet20").parameters()]
    sizes = [math.prod(shape) for shape in shapes]
    encoded = [size for size in sizes if size >= _THRESHOLD]
    left = 4 * (sum(sizes) - sum(encoded))
    draws: dict[str, Callable[[int], np.ndarray]] = {
        "one magnitude, random signs": lambda size: rng.choice([-1.0, 1.0], size),
        "uniform": lambda size: rng.uniform(-1, 1, size),
        "normal": rng.standard_normal,
        "Laplace": lambda size: rng.laplace(size=size),
        "Cauchy": rng.standard_cauchy,
    }
    lines = []
    for name, draw in draws.items():
        whole = _histogram(4, "l2", "entropy", [draw(1 << 20)])
        tensors = _histogram(4, "l2", "entropy", [draw(size) for size in encoded])
        lines.append(
            (
                name,
                f"{1 - whole.zeros:.1%}",
                f"{32 / whole.packed_bits:.0f}",
                f"{4 * sum(encoded) / tensors.packed_bytes:.0f}",
                f"{4 * sum(sizes) / (tensors.packed_bytes + left):.0f}",
            )
        )
    header = (
        "noise",
        "codes that are not zero",
        "full buckets: times smaller",
        "ResNet-20's encoded tensors",
        "with those left in 32 bits",
    )
    return Table(header, lines)


_THRESHOLD = 1024
"""The number of elements of the smallest tensor that the frontends encode by default."""


def _histogram(levels: int, norm: str, coding: str, tensors: list[np.ndarray]) -> Histogram:
    histogram = Histogram()
    codec = ECQ(levels, norm, 4096, coding=coding)  # type: ignore[arg-type]
    native = Native(histogram.add)
    for number, tensor in enumerate(tensors):
        x = tensor.astype(np.float32)
        native.through(codec, x.shape, x, NoiseKey(tensor=number))
    return histogram


def text_bytes() -> Table:
    """Bytes per step with an entropy code, after the first step, and the losses of the settings."""
    runs = {one["compression"]: one for one in record("train-text-entropy")["runs"]}
    lost = {one["compression"]: one for one in record("accuracy-text")["compressions"]}
    lines = []
    for name, spec in (
        ("ECQ, 7 levels, `alpha=0.01`", "ecq:{}bucket=4096,alpha=0.01"),
        ("ECQ, the paper's settings", "ecq:levels=4,norm=l2,{}bucket=4096"),
        ("1-bit SGD", "onebit"),
    ):
        own = lost[spec.format("")]
        plain = own["message_bytes_per_step"]
        coded = runs.get(spec.format("coding=entropy,"))
        cell = "" if coded is None else f"{_after_the_first(coded, plain):,.0f}"
        lines.append((name, f"{plain:,.0f}", cell, f"{own['difference']:+.3f}"))
    return Table(("setting", "bytes a step, plain", "entropy coded", "difference"), lines)


def _after_the_first(run: dict[str, float], first: float) -> float:
    """The mean bytes of all steps but the first, which sends as many as with plain codes."""
    steps = run["steps"]
    return (steps * run["message_bytes_per_step"] - first) / (steps - 1)
