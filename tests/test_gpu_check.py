"""The check for GPU machines records what it can and cannot do, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cuda.executors import missing_gpu

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


def test_every_part_that_cannot_run_is_in_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    parts = ("sanitizer", "benchmark", "training")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(out), "--quick", "--only", *parts],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    record = json.loads(out.read_text())
    statuses = {name: entry["status"] for name, entry in record["parts"].items()}
    assert len(statuses) == 5
    assert done.returncode == (set(statuses.values()) != {"passed"}), done.stdout
    if missing_gpu():
        assert "passed" not in statuses.values(), "nothing passes where nothing can run"
        assert record["machine"]["torch"]
        assert "expected a GPU" in record["parts"]["benchmark"]["output"]
