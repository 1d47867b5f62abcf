"""The benchmark of data and model parallelism, as small as can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import grid
from tests import jobs


def test_it_measures_every_layout(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--batch", "8", "--width", "16", "--rounds", "2", "--block", "1", "--json", str(out)]
    command = jobs.forked("torchrun", "benchmarks.grid", *options)
    printed = jobs.run("torchrun", 4, command)
    record = json.loads(out.read_text())
    assert record["schema"] == grid.SCHEMA and record["ranks"] == 4
    rows = {(*row["layout"], row["kind"]): row for row in record["rows"]}
    encoded = [shape for shape in grid.layouts(4) if shape != grid.ALONE]
    assert encoded == [(4, 1), (2, 2), (1, 4)]
    assert list(rows) == [
        (1, 1, "32 bits"),
        *((*shape, kind) for shape in encoded for kind in ("32 bits", "encoded")),
    ]
    assert rows[1, 1, "32 bits"]["ratio"] == pytest.approx([1, 1, 1])
    for row in record["rows"]:
        assert len(row["rounds"]) == 2 and min(min(one) for one in row["rounds"]) > 0
        assert "{} x {}".format(*row["layout"]) in printed
