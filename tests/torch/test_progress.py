"""The thread that goes on with exchanges between hooks."""

from __future__ import annotations

import subprocess
import sys

_ENDS = """
import sys, threading, types
import torch
from hvd_compress.exchanges.comm import Collective
from hvd_compress.engine.run import Run
from hvd_compress.torch.progress import Poller

class Collectives:
    def start(self, collective, name): return self
    def done(self): return True
    def wait(self): return torch.ones(300, 300)

def exchange(values):
    request = Collective("all_gather", values, ranks=2, rank=0, scope="all")
    yield request
    resumed.set()
    for _ in range(300):  # A second or so, mostly outside of Python.
        values @ values
    yield request

torch.set_num_threads(1)
resumed = threading.Event()
content = types.SimpleNamespace(note=lambda request: None)
progress = Poller(Collectives())
progress.submit(Run(exchange(torch.ones(300, 300)), content, ("all", "all"), name="values"))
resumed.wait()
sys.exit(3)
"""


def test_a_process_ends_with_its_status_while_its_thread_is_at_work() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
