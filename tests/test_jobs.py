"""Jobs of ranks that hang, and that are left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests import jobs
from tests.ranks import on_ranks

_LEFT_BEHIND = """
import os, signal, time
from tests import jobs

server = jobs.fork_server((), ())
program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
open("program.py", "w").write(program)
running = jobs._Running(server.command("program.py"), {})
while not running.printed().strip():
    time.sleep(0.02)
print(server._process.pid, running._process.pid, running.printed(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@on_ranks(2, launcher="torchrun", alone=True)
def _hangs() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        _waits_for_no_one()


def _waits_for_no_one() -> None:
    signal.pause()


def test_ranks_that_hang_say_where_they_stand() -> None:
    """The test fails long before its time limit."""
    kind = jobs.Kind("torchrun", 2, (), "test_jobs.py")
    began = time.monotonic()
    with mock.patch.object(jobs, "IDLE", 3):
        first, second = jobs.outcomes(kind, "tests.test_jobs:_hangs", alone=True)
    assert time.monotonic() < began + jobs.TIMEOUT / 2
    assert "did not end" in first and "in barrier" in first and "_waits_for" not in first
    assert "did not end" in second and "in _waits_for_no_one" in second


def test_nothing_is_left_of_tests_that_are_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    command = [
        sys.executable,
        "-c",
        _LEFT_BEHIND.replace("program.py", str(tmp_path / "program.py")),
    ]
    killed = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    left = [int(number) for number in killed.stdout.split()]
    assert len(left) == 3
    until = time.monotonic() + 60
    while any(Path(f"/proc/{one}").exists() for one in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [one for one in left if Path(f"/proc/{one}").exists()]
