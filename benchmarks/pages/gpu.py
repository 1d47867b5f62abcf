"""Tables of tests and times on a GPU."""

from __future__ import annotations

import re

from benchmarks import codec_cuda
from benchmarks.pages.reading import record
from benchmarks.tables import Table


def codecs() -> Table:
    """Bandwidths as shares of a copy's, and the milliseconds of encoding 64 Mi elements with feedback."""
    found = record("codec-h200")["sizes"][0]
    lines = []
    for name, row in found["codecs"].items():
        cells = [row[one] for one in codec_cuda.MEASURED]
        shares = ["" if one is None else f"{one['share_of_copy_bandwidth']:.2f}" for one in cells]
        feedback = row["encode_with_feedback"]
        milliseconds = "" if feedback is None else f"{feedback['seconds'] * 1e3:.3f}"
        lines.append(
            (name, f"{row['bits_per_element']:.2f}", *shares[:2], milliseconds, *shares[2:])
        )
    header = ("codec", "bits an element", *codec_cuda.TITLES[:2], "ms", *codec_cuda.TITLES[2:])
    return Table(header, lines)


def checks() -> Table:
    """The parts of ``make gpu-check`` with their commits and outcomes."""
    lines = []
    for name in ("gpu-check-h200", "gpu-frontends-h200"):
        found = record(name)
        commit = found["machine"]["commit"]
        for part, entry in found["parts"].items():
            told = re.sub(r" in [\d.]+s.*", "", entry.get("last_line", "")).strip("= ")
            said = told if re.search(r"\d+ passed|SUMMARY", told) else ""
            at = entry.get("commit", commit)
            lines.append((part, f"`{at}`", entry["status"], said))
    return Table(("part", "commit", "outcome", "what it said last"), lines, left=4)


def launches() -> Table:
    """The launches of a bucket of 40 tensors in each stage, and the host's time."""
    lines = []
    for row in record("gpu-check-h200")["parts"]["launches"]["result"]["rows"]:
        stages = [str(row["launches"].get(one, "")) for one in _STAGES]
        times = [f"{row[one]:.1f}" for one in ("us_per_tensor", "kernel_calls_us_per_tensor")]
        lines.append((f"`{row['exchange']}`", str(row["ranks"]), *stages, *times))
    return Table(("exchange", "ranks", *_STAGES, "us a tensor", "in kernel calls"), lines)


_STAGES = ("encode", "between", "decode", "settle")
