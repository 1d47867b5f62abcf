"""No frontend uses memory that is not there yet, or no longer, in whatever order a GPU's streams run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch

from hvd_compress.process_group.device_collectives import InStream
from hvd_compress.process_group.streams import SideStream
from tests.cuda.executors import emulated_library
from tests.hostdev import hostdev, trainings
from tests.hostdev.races import Found, Race, without_races
from tests.ranks import on_ranks

DEVICE = {"HVDC_TEST_DEVICE": hostdev.TYPE}


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the device before the ranks start, which would build it at the same time."""
    emulated_library()
    hostdev.library()


def _found(make: trainings.Make) -> Found:
    with without_races() as found:
        trainings.trained(make, torch.device(hostdev.TYPE, 0))
    return found


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_no_frontend_races() -> None:
    """Nor does PyTorch without this package."""
    for make in (*trainings.STOCK, *trainings.OURS):
        assert _found(make).crossed > 40, make.__name__


@on_ranks(4, launcher="torchrun", environment=DEVICE)
def test_shards_of_replicas() -> None:
    for make in (trainings.fsdp_of_replicas, trainings.fsdp_that_accumulates):
        assert _found(make).crossed > 40, make.__name__


def _nowhere(_: InStream) -> AbstractContextManager[None]:
    return nullcontext()


def _nothing(*_: object) -> None:
    return


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_what_is_left_out_is_found() -> None:
    """Each race is found without the code that prevents it."""
    unordered, reused = "restore in stream 0 is not behind", "of stream 0 is reused while stream"
    for where, name, without, complaint, makes in (
        (InStream, "behind", _nowhere, unordered, (trainings.ddp, trainings.ddp_of_factors)),
        (
            SideStream,
            "caught_up",
            _nothing,
            "in stream 0 is not behind restore",
            (trainings.ddp, trainings.ddp_in_two_shots, trainings.onebit_adam),
        ),
        (
            SideStream,
            "takes",
            _nothing,
            reused,
            (
                trainings.ddp,
                trainings.all_reduce,
                trainings.double_buffering,
                trainings.diloco_of_fragments_on_their_way,
            ),
        ),
    ):
        for make in makes:
            with (
                mock.patch.object(where, name, without),
                pytest.raises(Race, match=complaint),
            ):
                _found(make)
