"""The check for GPU machines records what it can and cannot do, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import jobs
from tests.cuda.executors import missing_gpu

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


def test_every_part_that_cannot_run_is_in_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    parts = ("sanitizer", "benchmark", "training", "tensorflow")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(out), "--quick", "--only", *parts],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    record = json.loads(out.read_text())
    statuses = {name: entry["status"] for name, entry in record["parts"].items()}
    assert len(statuses) == 8
    assert done.returncode == (set(statuses.values()) != {"passed"}), done.stdout
    if missing_gpu():
        assert "passed" not in statuses.values(), "nothing passes where nothing can run"
        assert record["machine"]["torch"]
        for part in ("benchmark", "training with DDP, one rank by NCCL"):
            assert "expected a GPU" in record["parts"][part]["output"]
        assert "tensorflow that finds a GPU" in record["parts"]["tensorflow"]["missing"]


def test_the_training_with_ddp_where_the_device_is_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "ddp.json"
    chosen = ["--compression", "onebit", "--exchange", "two_shot", "--device", "cpu"]
    printed = jobs.run(
        "torchrun",
        2,
        jobs.forked("torchrun", "scripts/train_ddp.py", *chosen, "--json", str(out)),
        {"PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert "runs: 1, all as on the CPU" in printed, printed
    run = json.loads(out.read_text())["runs"]["onebit, two_shot"]
    assert run["differs_from_cpu"] is None and run["same_on_all_ranks"]
    assert run["loss_at_last"] < 0.8 * run["loss_at_first"]
