"""How ranks wait for each other."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

from hvd_compress.torch.collectives import Collectives
from tests.ranks import on_ranks


@on_ranks(2)
def test_a_waiting_rank_leaves_the_processor_to_others() -> None:
    collectives = Collectives(None, "waiting")
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1.0)
    handle = collectives.all_gather(torch.full((3,), hvd.rank(), dtype=torch.uint8), "late")
    cpu, wall = time.thread_time(), time.perf_counter()

    gathered = collectives.wait(handle)

    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    assert gathered.tolist() == [0, 0, 0, 1, 1, 1]
    if hvd.rank() == 0:
        assert wall > 0.8 and cpu < 0.3 * wall
