"""A rank that is killed under ``torchrun --max-restarts``, by the documentation's own script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs import ROOT

TIMEOUT = 300
SCRIPT = "docs/examples/restart_ddp.py"
NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without this variable, half of the restarts meet addresses of former ranks (PyTorch issue 135712)."""


def _start(checkpoint: Path, printed: Path, steps: int) -> subprocess.Popen[bytes]:
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [SCRIPT, "--steps", str(steps), "--checkpoint", str(checkpoint)]
    with printed.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *script],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", NOT_SHARED: "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _ended(printed: str) -> list[tuple[str, ...]]:
    """Rank, first step, weights and share of the bytes of each rank, by rank."""
    pattern = r"rank (\d) began at step (\d+) and ends with weights (\S+), bytes ([\d.]+) of"
    return sorted(re.findall(pattern, printed))


def test_a_killed_rank_has_all_start_again_where_the_checkpoint_is(tmp_path: Path) -> None:
    steps = 600  # So many that the job is still running when its rank is killed.
    whole = tmp_path / "whole"
    job = _start(tmp_path / "never.pt", whole, steps)
    assert job.wait(TIMEOUT) == 0, whole.read_text()

    printed = tmp_path / "printed"
    job = _start(tmp_path / "checkpoint.pt", printed, steps)
    try:
        limit, victim = time.monotonic() + TIMEOUT, None
        saved = None  # By rank 0, a moment before it says so.
        while victim is None or saved is None:
            assert job.poll() is None and time.monotonic() < limit, printed.read_text()
            saved = re.search(r"step 100: rank 0", printed.read_text())
            victim = re.search(r"step 100: rank 1, process (\d+)", printed.read_text())
            time.sleep(0.02)
        os.kill(int(victim[1]), signal.SIGKILL)
        assert job.wait(TIMEOUT) == 0, printed.read_text()
    finally:
        job.terminate()

    expected, got = _ended(whole.read_text()), _ended(printed.read_text())
    assert len(expected) == len(got) == 2, printed.read_text()
    assert [one[1] for one in expected] == ["0", "0"]
    assert int(got[0][1]) == int(got[1][1]) >= 100, printed.read_text()
    assert {one[2] for one in expected} == {one[2] for one in got}, "the same weights, bit for bit"
    assert len({one[2] for one in got}) == 1
    assert all(float(one[3]) < 0.1 for one in [*expected, *got])
