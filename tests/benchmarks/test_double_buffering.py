"""The benchmark of half-batches, as small as can be."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import double_buffering
from tests import jobs


def test_it_measures_both_ways(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--batch", "8", "--width", "16", "--rounds", "2", "--block", "1", "--json", str(out)]
    command = jobs.forked("torchrun", "benchmarks.double_buffering", *options)
    printed = jobs.run("torchrun", 2, command)
    record = json.loads(out.read_text())
    assert record["schema"] == double_buffering.SCHEMA and record["ranks"] == 2
    assert [row["batch"] for row in record["rows"]] == [8, 8]
    for row in record["rows"]:
        whole, halves = (row["rounds"][name] for name in ("whole", "halves"))
        assert row["gain"][1] <= row["gain"][0] <= row["gain"][2]
        assert row["gain"][0] == sum(w / h for w, h in zip(whole, halves, strict=True)) / 2
        assert row["compression"] in printed
