"""Ranks that wait for each other, and for ranks that are gone."""

from __future__ import annotations

import time
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics

from hvd_compress.torch.collectives import HorovodCollectives
from tests.ranks import on_ranks


@on_ranks(2)
def test_a_waiting_rank_leaves_the_processor_to_others() -> None:
    collectives = HorovodCollectives(None, "waiting")
    own = torch.full((3,), hvd.rank(), dtype=torch.uint8)
    if hvd.rank() == 0:
        handle = collectives.all_gather(own, "late")
    waits = hvd.allreduce_async(torch.ones(1), name="rank 0 is about to wait")
    if hvd.rank() == 1:
        hvd.synchronize(waits)
        time.sleep(2.0)
        handle = collectives.all_gather(own, "late")
    cpu, wall = time.thread_time(), time.perf_counter()

    gathered = handle.wait()

    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    assert gathered.tolist() == [0, 0, 0, 1, 1, 1]
    if hvd.rank() == 0:
        hvd.synchronize(waits)
        assert wall > 0.8 and cpu < 0.3 * wall


@on_ranks(2, alone=True, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_a_process_set_that_is_gone_is_an_error_after_which_elastic_training_goes_on() -> None:
    chosen = hvd.add_process_set([1])
    collectives = HorovodCollectives(chosen, "gone")
    message = torch.zeros(4, dtype=torch.uint8)
    if hvd.rank() == 1:
        assert collectives.all_gather(message, "there").wait().numel() == 4
    number = chosen.process_set_id
    hvd.remove_process_set(chosen)
    chosen.process_set_id = number  # As for one that Horovod has removed by itself.
    with pytest.raises(HorovodInternalError, match="a process set is gone"):
        collectives.all_gather(message, "gone")
    with pytest.raises(HorovodInternalError, match="a process set is gone"):
        collectives.all_reduce(torch.zeros(4), "gone")


@on_ranks(2, alone=True, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_so_it_is_where_horovod_has_ended_meanwhile() -> None:
    chosen = hvd.add_process_set([1])
    collectives = HorovodCollectives(chosen, "gone")
    number = chosen.process_set_id
    hvd.remove_process_set(chosen)
    chosen.process_set_id = number
    ended = ValueError("Horovod has not been initialized properly; use hvd.init().")
    with (
        mock.patch.object(_basics, "_get_process_set_ids_and_ranks", side_effect=ended),
        pytest.raises(HorovodInternalError, match="a process set is gone"),
    ):
        collectives.all_gather(torch.zeros(4, dtype=torch.uint8), "gone")
