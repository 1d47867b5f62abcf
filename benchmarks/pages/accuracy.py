"""Tables of the records that ``benchmarks.accuracy`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.intervals import paired
from benchmarks.pages.reading import label, record, signed
from benchmarks.tables import Table


def differences(
    *parts: tuple[str, Sequence[str]] | str, baseline: tuple[str, str] | None = None
) -> Table:
    """A line for each compression: the mean over the seeds, and the difference to uncompressed runs.

    Args:
        parts: the names of records, each alone or with the compressions that the table shows.
        baseline: the record and the compression to which the differences are, over the seeds of both;
            None is each record's own baseline.
    """
    rows: list[dict[str, Any]] = []
    for part in parts:
        name, wanted = (part, None) if isinstance(part, str) else part
        found = {one["compression"]: one for one in record(name)["compressions"]}
        rows += [found[one] for one in (found if wanted is None else wanted)]
    if baseline is not None:
        control = next(
            one["by_seed"]
            for one in record(baseline[0])["compressions"]
            if one["compression"] == baseline[1]
        )
        rows = [_beside(one, control) for one in rows]
    bits = "test_bits" in rows[0]
    bytes_known = all("message_bytes_per_step" in one for one in rows)
    header = [
        "compression",
        *(["bytes a step"] if bytes_known else []),
        "seeds",
        "test bits a byte" if bits else "test accuracy",
        "difference",
        "95% interval",
    ]
    return Table(header, [_line(one, bits, bytes_known) for one in rows])


def _beside(one: dict[str, Any], control: dict[str, float]) -> dict[str, Any]:
    shared = one["by_seed"].keys() & control.keys()
    found = paired(
        *([values[seed] for seed in sorted(shared)] for values in (one["by_seed"], control))
    )
    return {**one, "difference": found.mean, "low": found.low, "high": found.high}


def _line(one: dict[str, Any], bits: bool, bytes_known: bool) -> list[str]:
    digits = 3 if bits else 2
    cells = [label(one["compression"])]
    if bytes_known:
        cells.append(f"{one['message_bytes_per_step']:,.0f}")
    cells.append(str(one["seeds"]))
    cells.append(f"{one['test_bits']:.3f}" if bits else f"{one['test_accuracy']:.2f}%")
    if one["low"] == one["high"] == 0:
        return [*cells, "", ""]
    ends = (signed(one[end], digits) for end in ("low", "high"))
    return [*cells, signed(one["difference"], digits), " to ".join(ends)]
