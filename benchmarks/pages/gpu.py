"""Tables of what a GPU has run, and how fast."""

from __future__ import annotations

import re

from benchmarks import codec_cuda
from benchmarks.pages.reading import record
from benchmarks.tables import Table


def codecs() -> Table:
    """Bytes that have to move in a second, as a share of what a copy moves; and of 64 Mi elements, ms."""
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
    """Each part of ``make gpu-check``, and how it ended."""
    lines = []
    for name, part in record("gpu-check-h200")["parts"].items():
        told = re.sub(r" in [\d.]+s.*", "", part.get("last_line", ""))
        said = told if re.match(r"\d+ (passed|failed)|=+ \w+ SUMMARY", told) else ""
        missing = part.get("missing")
        outcome = f"{part['status']}: no {missing}" if missing else part["status"]
        lines.append((name, outcome, said.strip("= ")))
    return Table(("part", "outcome", "what it said last"), lines)
