"""The program of the ranks in the lab's tests: ``python -m tests.lab.ranks_program WHAT``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

ELEMENTS = 500_000


def rates() -> None:
    """Measures a sum at three rates, best of ten."""
    hvd.init()
    seconds = {}
    for rate in ("100mbit", "400mbit", "none"):
        _change_rate(rate)
        times = []
        for _ in range(10):
            x = torch.full((ELEMENTS,), float(hvd.rank() + 1))
            hvd.barrier()
            start = time.perf_counter()
            total = hvd.allreduce(x, name="x", op=hvd.Sum)
            times.append(time.perf_counter() - start)
            assert torch.equal(total, torch.full((ELEMENTS,), 3.0))
        seconds[rate] = min(times)
    _report({"hostname": socket.gethostname(), "seconds": seconds})


def groups() -> None:
    """Sums within process sets, whose ranks listen at the address of the host's name."""
    groups = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
    hvd.init(process_sets=groups)
    mine = groups[hvd.rank() % 2]
    total = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, name="x", process_set=mine)
    hvd.barrier()  # A rank that ends shuts down Horovod, also for the other set's sum.
    _report(
        {
            "host": os.environ["HOROVOD_HOSTNAME"],
            "hostname": socket.gethostname(),
            "address": socket.gethostbyname(socket.gethostname()),
            "local": [hvd.local_rank(), hvd.local_size()],
            "cross": [hvd.cross_rank(), hvd.cross_size()],
            "sum": total.item(),
            "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        }
    )


def death() -> None:
    """Kills rank 1 during a sum."""
    hvd.init()
    for step in range(1_000_000):
        if hvd.rank() == 1 and step == 20:
            hvd.allreduce_async(torch.ones(ELEMENTS), name="last")
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(ELEMENTS), name="x")


def plans() -> None:
    """Reports the plans at a low rate, and at a lower one with a state saved on a fast network."""
    import hvd_compress.torch as hvdc
    from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(500, 250, bias=False)
    compressor = hvdc.Auto(model, codecs=("int8",))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )
    x, found = torch.ones(4, 500), []

    def train(steps: int, until: Callable[[], bool]) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if until():
                break
        found.append(compressor.explain())

    _change_rate("100mbit")
    train(400, lambda: compressor.settled)
    _change_rate("20mbit")
    state = compressor.state_dict()
    state["planner"].update(plan={"weight": str(UNCOMPRESSED_ROUTE)}, bandwidth=1e9)
    compressor.load_state_dict(state)
    train(1, lambda: True)
    train(400, lambda: not compressor.settled)
    train(400, lambda: compressor.settled)
    _report({"found": found})


def _change_rate(rate: str) -> None:
    hvd.barrier()
    if hvd.rank() == 1:
        change = [sys.executable, "-m", "benchmarks.lab.change_rate", rate]
        subprocess.run(change, check=True)
    hvd.barrier()


def _report(found: dict[str, object]) -> None:
    print(json.dumps({"rank": hvd.rank(), **found}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
