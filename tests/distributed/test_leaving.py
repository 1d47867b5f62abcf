"""Process groups' threads are still at work when training, or the process, is over."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hvd_compress.process_group import shutdown
from hvd_compress.process_group.collectives import Collectives
from tests import jobs
from tests.ranks import on_ranks

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc

sys.setswitchinterval(100)  # The other threads have to wait, as on a machine with too much to do.
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
compressor = hvdc.Compressor(model, "onebit", exchange=sys.argv[1])
model.register_comm_hook(compressor, hvdc.hook)
print("started", flush=True)
for _ in range(3):
    model(torch.randn(8, 64)).sum().backward()
if sys.argv[2] == "checkpoint":
    hvdc.GatheredState(compressor).state_dict()
    dist.destroy_process_group()
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return jobs.run("torchrun", 2, command, {"PYTHONPATH": str(jobs.ROOT)})


def _check_end(printed: str, said: str, times: int) -> None:
    assert printed.count(said) == times, printed
    assert "terminate" not in printed, printed
    assert "FAILED" not in printed, printed


@pytest.mark.parametrize(
    "exchange, last", [("allgather", "step"), ("two_shot", "step"), ("allgather", "checkpoint")]
)
def test_the_process_ends_well_right_after(exchange: str, last: str) -> None:
    for _ in range(2):  # Without care for it, one start in five ends badly.
        _check_end(_run(SCRIPT, exchange, last), "started", 2)


LEFT = """
import os
import sys
import time

import torch
import torch.distributed as dist

from hvd_compress.process_group.collectives import Collectives

dist.init_process_group("gloo")
path = sys.argv[1]


class Slow:
    def __del__(self, mark=os.mkdir, path=path, sleep=time.sleep):
        mark(path)
        sleep(1)


if dist.get_rank() == 0:
    sys.slow = Slow()  # The interpreter frees it while it ends.
    collectives = Collectives(None)
    for _ in range(3):
        _, work = collectives.all_gather(torch.zeros(10))
        collectives.when_over(work, lambda error: print(f"told {error is not None}", flush=True))
else:
    while not os.path.exists(path):
        time.sleep(0.01)
    os._exit(0)
"""


def test_the_process_ends_well_while_its_peers_leave_it(tmp_path: Path) -> None:
    _check_end(_run(LEFT, str(tmp_path / "ends")), "told True", 3)


LATE = """
import sys
import time

import torch
import torch.distributed as dist

from hvd_compress.process_group.collectives import Collectives


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(3)


def over(error):
    time.sleep(2)  # The interpreter would end meanwhile, and stop the thread by force.
    print("told", flush=True)


dist.init_process_group("gloo")
sys.slow = Slow()  # The interpreter frees it while it ends.
collectives = Collectives(None)
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(0.2)  # The other rank is at its end.
_, work = collectives.all_gather(torch.zeros(10))
collectives.when_over(work, over)
del work
"""


def test_the_process_ends_well_before_what_it_has_started() -> None:
    _check_end(_run(LATE), "told", 2)


FORK = """
import os
import sys

import torch
import torch.distributed as dist

from hvd_compress.process_group.collectives import Collectives

dist.init_process_group("gloo")
collectives = Collectives(None)
collectives.all_gather(torch.zeros(10))[1].wait()
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1:
    store.wait(["ended"])
_, work = collectives.all_gather(torch.zeros(10))
collectives.when_over(work, lambda error: None)
if dist.get_rank() == 0:
    child = os.fork()
    if not child:
        sys.exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    store.set("ended", "")
work.wait()
print("fine", flush=True)
"""


def test_a_forked_process_ends_without_its_parents_collectives() -> None:
    printed = _run(FORK)
    assert "child 7" in printed and printed.count("fine") == 2, printed


class _Late:
    """An object whose last reference takes long to drop: until ``released`` is set."""

    released, dropped = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.released.wait(60)
        self.dropped.set()


def _exchange() -> None:
    collectives, over, late = Collectives(dist.group.WORLD), threading.Event(), _Late()

    def call(error: Exception | None, kept: tuple = (collectives, late)) -> None:
        over.set()

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["registered"])  # So that the other's thread is the one that calls back.
        _Late.released.set()
    _, work = collectives.all_gather(torch.zeros(10))
    collectives.when_over(work, call)
    del late, call, work
    if dist.get_rank() == 1:
        store.set("registered", "")
    assert over.wait(60)


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_group_can_be_destroyed_before_its_thread_has_dropped_it() -> None:
    _exchange()
    assert dist.get_rank() == 0 or not _Late.dropped.is_set()
    dist.destroy_process_group()
    gc.collect()
    _Late.released.set()
    assert _Late.dropped.wait(60)
    time.sleep(0.5)  # A thread that waits for itself takes the process with it.


class _Handed:
    """The queue of groups to free; who adds a group goes on when another thread has had time to free it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, entry: Any) -> None:
        self._queue.put(entry)
        time.sleep(0.5)

    def get(self) -> Any:
        return self._queue.get()


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_thread_that_frees_the_owner_of_its_own_group() -> None:
    """It is not the last one to refer to the group, or it would wait for itself."""
    made = Collectives(None)
    with mock.patch.object(shutdown, "_released", _Handed(shutdown._released)):
        own = made.among(range(2))
        over, freed = threading.Event(), weakref.ref(own)

        def call(error: Exception | None, kept: Any = (own,)) -> None:
            over.set()

        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        if rank == 0:
            store.wait(["registered again"])
        _, work = own.all_gather(torch.zeros(10))
        own.when_over(work, call)
        del call, work, own
        if rank == 1:
            store.set("registered again", "")
        assert over.wait(60)
        while freed() is not None:
            time.sleep(0.01)
    time.sleep(1.0)
    dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_an_error_that_is_kept_does_not_keep_what_is_waited_for_at_the_end() -> None:
    """The frames of its traceback know those that called them, up to where a collective was over."""
    collectives, errors, works = Collectives(None), [], []

    def over(error: Exception | None) -> None:
        try:
            raise error or RuntimeError("what the average is used for fails")
        except RuntimeError as problem:
            errors.append(problem)

    for _ in range(3):
        _, work = collectives.all_gather(torch.zeros(10))
        work.wait()
        while not work.get_future().done():
            time.sleep(0.001)
        collectives.when_over(work, over)  # At once, in this thread.
        works.append(work)
    assert len(errors) == 3
    assert [one for one in shutdown._underway if one.work in works and not one.dropped] == []
