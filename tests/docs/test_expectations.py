"""The README's table of what to expect tells what the records hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.frontier.points import by_optimizer, points
from benchmarks.frontier.tasks import TEXT
from benchmarks.pages import time_to_loss
from benchmarks.papers import record
from hvd_compress.planner.choices import DEFAULT_CODECS

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "benchmarks" / "records"
ROWS = re.findall(
    r"^\| (.*?) \| (.*?) \| (.*?) \|$",
    (ROOT / "README.md")
    .read_text()
    .partition("<!-- what to expect -->")[2]
    .partition("<!-- end")[0],
    re.MULTILINE,
)


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / name).read_text())
    return found


def _row(begin: str) -> str:
    (result,) = [text for what, text, _ in ROWS if what.startswith(begin)]
    return result


def _speed(record: str, codec: str) -> str:
    seconds = _record(record)["seconds"]
    return f"{median(seconds['none']) / median(seconds[codec]):.1f}"


def test_a_transformer() -> None:
    text = _row("speed: a transformer")
    records = [f"lab-ddp-gpt-{rate}mbit.json" for rate in (50, 100, 200, 500)]
    for codec, begin in (("onebit", "a step is"), ("int8", "without compression, and")):
        *first, last = (_speed(record, codec) for record in records)
        assert f"{begin} {', '.join(first)} and {last} times" in text
    slower = [_record(f"lab-ddp-gpt-{link}.json")["seconds"] for link in ("1gbit", "none")]
    for one in slower:
        assert all(0.85 < median(one["none"]) / median(one[c]) < 1 for c in ("onebit", "int8"))


@pytest.mark.parametrize(
    "begin, record, codecs",
    [
        ("accuracy: SGD", "accuracy.json", ("int8", "onebit")),
        ("loss: SGD", "accuracy-text-momentum.json", ("int8", "ecq", "onebit")),
        ("loss: AdamW", "accuracy-text.json", ("int8", "ecq", "onebit")),
        ("loss: Muon", "accuracy-text-muon.json", ("int8", "ecq", "onebit")),
        ("loss: AdamW", "accuracy-text-onebit-adam.json", ("onebit:warmup_steps=100",)),
    ],
)
def test_accuracy(begin: str, record: str, codecs: tuple[str, ...]) -> None:
    found = {one["compression"]: one["difference"] for one in _record(record)["compressions"]}
    told = [float(n.replace("\u2212", "-")) for n in re.findall(r"[+\u2212]\d+\.\d+", _row(begin))]
    expected = [found[codec] for codec in codecs]
    assert told[-len(codecs) :] == pytest.approx(expected, abs=0.0051) or told[
        : len(codecs)
    ] == pytest.approx(expected, abs=0.0051)


def test_equal_bits() -> None:
    text, rows = _row("loss at equal bits"), record.read(RECORDS / "frontier-text.json").rows
    told = [float(n.replace("\u2212", "-")) for n in re.findall(r"[+\u2212]\d+\.\d+", text)]
    for optimizer, four in zip(("momentum", "adamw", "muon"), told, strict=True):
        own = by_optimizer(rows)[optimizer]
        found = {one.method: one.difference for one in points(own, TEXT.measure) if one.difference}
        assert four == pytest.approx(found["ecq:rotate=True,bucket=128"].mean, abs=0.00051)
        for method in ("bf16", "int8", "int8:kind=linear", "int8:kind=e4m3"):
            assert abs(found[method].mean) < 0.006


def test_time_to_a_loss() -> None:
    text, rows = _row("time to a loss"), {line[0]: line for line in time_to_loss.table().rows}
    assert f"a training loss of {time_to_loss.TARGET} bits a byte" in text
    told = re.findall(r"(\d\.\d+) times \(`(\w+)`\)", text)
    assert [(rows[name.lower()][4][:4], name) for _, name in told] == told


def test_every_record_is_there() -> None:
    names = [name for *_, records in ROWS for name in re.findall(r"`(.*?)`", records)]
    assert len(names) > 5
    for name in names:
        assert list(RECORDS.glob(name.rpartition("/")[2] or "*")), name


def test_auto_chooses_among_codecs_that_no_record_sets_apart_from_uncompressed() -> None:
    trained = [
        one for path in RECORDS.glob("accuracy*.json") for one in _record(path.name)["compressions"]
    ]
    for codec in DEFAULT_CODECS:
        found = [one for one in trained if one["compression"] == codec]
        assert all(one["low"] <= 0 <= one["high"] for one in found)
        assert codec == "fp16" or len(found) > 5
