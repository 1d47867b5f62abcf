"""Real ranks of torch.distributed, for experiments that cannot be simulated in one process."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

from benchmarks.papers.experiment import Advance

Body = Callable[[Any, Advance], Any]
"""A function that runs on every rank with the settings; the first rank's result is returned."""

_TICK = "tick"
_METHOD = "forkserver"
_IMPORTED_LATE = ("sklearn.datasets", "sklearn.model_selection", "torch._dynamo")
"""The modules that functions of ranks import."""


def run(count: int, body: Body, settings: Any, advance: Advance) -> Any:
    """Runs a function on ranks of this machine that are joined by Gloo, with a thread each.

    Args:
        count: the number of ranks.
        body: a function of a module that the ranks import.
        settings: its argument, the same on all ranks.
        advance: a function that is called for each tick of the first rank.

    Returns:
        The result of the first rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed.
    """
    # A server imports what the ranks need, once, and they are forked from it: the server has no threads.
    forkserver.set_forkserver_preload([body.__module__, *_IMPORTED_LATE])
    messages = mp.get_context(_METHOD).SimpleQueue()
    result: Any = None

    def drain() -> None:
        nonlocal result
        while not messages.empty():
            kind, content = messages.get()
            if kind == _TICK:
                advance()
            else:
                result = content

    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, body, settings, str(Path(folder, "store")), messages)
        started = start_processes(_rank, arguments, nprocs=count, join=False, start_method=_METHOD)
        assert started is not None
        while not started.join(timeout=0.2):
            drain()
        drain()
    return result


def _rank(rank: int, count: int, body: Body, settings: Any, store: str, messages: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Grad strides do not match")  # DDP, of convolutions.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    result = body(settings, (lambda: messages.put((_TICK, None))) if rank == 0 else lambda: None)
    if rank == 0:
        messages.put(("result", result))
    dist.barrier()
    dist.destroy_process_group()
