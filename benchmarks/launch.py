"""Starting a benchmark on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class RankError(RuntimeError):
    """A rank failed."""


def horovodrun(ranks: int, module: str, arguments: list[str]) -> None:
    """Runs ``python -m module`` on ``ranks`` ranks that share this machine, and waits for them.

    Raises:
        RankError: a rank ended with a status other than 0.
    """
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
    worker = [sys.executable, "-m", module, *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",  # No notes on what TensorFlow was built for.
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    status = subprocess.run([*launcher, *worker], cwd=ROOT, env=environment).returncode
    if status:
        raise RankError(f"expected {module} to succeed on {ranks} ranks, got status {status}")
