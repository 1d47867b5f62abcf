"""The comparison of the frontends measures both, and both compute."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

from benchmarks import frontends
from hvd_compress.codecs import OneBit
from hvd_compress.exchanges.routing import Route

ROOT = Path(__file__).parent.parent.parent
ROUTE = Route(OneBit(), exchange="allgather")


def test_both_sides_do_the_same_work() -> None:
    gradients = [
        np.random.default_rng(i).standard_normal(shape, np.float32)
        for i, shape in enumerate(((40, 70), (3000,)))
    ]
    sides = frontends.TorchSide(ROUTE, gradients, 1), frontends.GraphSide(ROUTE, gradients, 1)
    for _ in range(3):
        for side in sides:
            side.step()
    for theirs, ours in zip(*(side._slots for side in sides), strict=True):
        assert theirs.residual.numpy().any()
        assert theirs.residual.numpy().tobytes() == ours.residual.numpy().tobytes()
        assert theirs.step == int(ours.exchanges) == 3


def test_the_command(tmp_path: Path) -> None:
    """In a process of its own: TensorFlow's threads can be chosen only before its first operation."""
    out = tmp_path / "frontends.json"
    options = ["--model", "lenet", "--codec", "onebit", "int8", "--repeats", "2"]
    command = [sys.executable, "-m", "benchmarks.frontends", "--json", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["schema"] == frontends.SCHEMA
    assert list(result["codecs"]) == ["onebit", "int8"]
    assert result["elements"] == 48_000 + 10_080 + 2_400  # LeNet's matrices and second filters.
    for row in result["codecs"].values():
        for clock in ("wall", "cpu"):
            timing = row[clock]
            assert timing["torch_seconds"] > 0 and timing["tensorflow_seconds"] > 0
            assert timing["ratio_p10"] <= timing["ratio"] <= timing["ratio_p90"]
    assert "onebit" in done.stdout and "ratio of CPU time" in done.stdout
