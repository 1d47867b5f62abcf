"""``python -m benchmarks.predict`` with a network and machines of one's own, and its arguments."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict import arguments, report
from benchmarks.predict.__main__ import main
from hvd_compress import command_line

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / "benchmarks" / "records" / "codec-cpu.json"
ALEXNET = ("--model", str(ROOT / "docs" / "examples" / "alexnet.json"))
MINE = (*ALEXNET, "--machine", "gpu", "--compute", "0.15s", "--batch", "128")


def _predict(tmp_path: Path, *options: str) -> dict:
    """Returns the command's prediction, by default of AlexNet; the last one of an option counts."""
    path = tmp_path / "deep" / "out.json"
    assert main([*MINE, *options, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_as_a_module() -> None:
    codecs = "--codec", "none", "fp16", "onebit"
    command = [sys.executable, "-m", "benchmarks.predict", *MINE, "--workers", "1,2,8", *codecs]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title, header, *lines = printed.splitlines()
    assert "alexnet, 128 images a worker" in title and "images/s" in header
    assert [line.split()[1:3] for line in lines] == [
        [exchange, workers]
        for exchange in ("allreduce", "allreduce", "two_shot")
        for workers in ("1", "2", "8")
    ]


def test_json_holds_what_was_asked_for(tmp_path: Path) -> None:
    outcome = _predict(
        tmp_path,
        *("--machine", "cpu", "--workers", "2,4", "--codec", "onebit:group=512"),
        *("--exchange", "allgather", "two_shot", "--link", "200mbit", "--efficiency", "0.5"),
        *("--latency", "1ms", "--start", "0s", "--compute", "1.5s", "--batch", "16"),
        *("--speeds", str(RECORD)),
    )
    assert outcome["schema"] == report.SCHEMA and outcome["elements"] == 61_100_840
    assert outcome["machine"]["between"] == {"bandwidth": 1.25e7, "latency": 1e-3}
    assert outcome["machine"]["start"] == 0
    assert [(row["exchange"], row["workers"]) for row in outcome["rows"]] == [
        ("allgather", 2),
        ("allgather", 4),
        ("two_shot", 2),
        ("two_shot", 4),
    ]
    for row in outcome["rows"]:
        assert math.isclose(row["computation_seconds"], 1.5)
        assert math.isclose(row["images_per_second"], row["workers"] * 16 / row["seconds"])
        assert math.isclose(row["speedup"], row["images_per_second"] / (16 / 1.5))
        assert row["codec"] == "OneBit(group=512)" and row["refused"] is None


def test_without_overlap_no_step_is_faster(tmp_path: Path) -> None:
    options = ("--workers", "8,64", "--link", "100gbit")
    hidden = _predict(tmp_path, *options)["rows"]
    shown = _predict(tmp_path, *options, "--no-overlap")["rows"]
    assert all(b["seconds"] > a["seconds"] for a, b in zip(hidden, shown, strict=True))


def test_bits_of_entropy_codes(tmp_path: Path) -> None:
    options = ("--machine", "cpu", "--workers", "2", "--codec", "ecq", "ecq:coding=entropy")
    options += ("--exchange", "allgather")
    plain, coded = _predict(tmp_path, *options)["rows"]
    same, fewer = _predict(tmp_path, *options, "--bits", "0.5")["rows"]
    sent = [row["wire_bytes"] for row in (plain, coded, fewer)]
    assert sent == sorted(sent, reverse=True) and sent[2] < 0.3 * sent[1] and same == plain


def own() -> dict[str, tuple[int, ...]]:
    """A network of a user's own."""
    return {"fc1.weight": (300, 200), "fc1.bias": (300,), "fc2.weight": (10, 300)}


def test_a_network_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own()))
    options = ["--batch", "8", "--compute", "10ms", "--workers", "8", "--link", "200mbit"]
    by_file = _predict(tmp_path, "--model", str(path), *options)
    assert capsys.readouterr().out.startswith("mine, 8 images a worker and step, ")
    by_function = _predict(
        tmp_path, "--model", "tests.benchmarks.test_predict_arguments:own", *options
    )
    assert by_file["elements"] == by_function["elements"] == 63_300
    assert by_file["rows"] == by_function["rows"]
    model = _predict(
        tmp_path, "--model", "tests.benchmarks.test_predict_arguments:own_model", *options
    )
    assert model["rows"] == by_file["rows"]


def own_model() -> Any:
    """The same in PyTorch."""
    import torch

    model = torch.nn.Module()
    model.fc1, model.fc2 = torch.nn.Linear(200, 300), torch.nn.Linear(300, 10, bias=False)
    return model


def test_units() -> None:
    assert arguments.bandwidth("1gbit") == 1.25e8 and arguments.bandwidth("2.5Mbit") == 312_500
    assert arguments.bandwidth("none") == math.inf
    assert arguments.duration("50us") == pytest.approx(5e-5) and arguments.duration("0.1ms") == 1e-4
    assert arguments.workers("1,2,4..32,6") == [1, 2, 4, 6, 8, 16, 32]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("hvd-compress 0.1.0")
