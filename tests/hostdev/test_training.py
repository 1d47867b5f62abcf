"""Training on a device that is not a GPU's, by the code for CUDA devices, beside the same on the CPU."""

from __future__ import annotations

import pytest
import torch

from hvd_compress.process_group.device_collectives import InStream, ThroughHost, collectives_of
from tests.contract import residuals, results
from tests.contract.ddp import DDP
from tests.contract.distributed import Distributed
from tests.cuda.executors import emulated_library
from tests.distributed import test_all_reduce_errors
from tests.hostdev import hostdev, trainings
from tests.hostdev.trainings import CPU, gloo, trained
from tests.ranks import on_ranks

DEVICE = {"HVDC_TEST_DEVICE": hostdev.TYPE}


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the device before the ranks start, which would build it at the same time."""
    emulated_library()
    hostdev.library()


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_every_frontend_beside_the_cpu() -> None:
    """The parameters are the same, bit for bit."""
    device = torch.device(hostdev.TYPE, 0)
    for make in trainings.OURS:
        pairs = zip(trained(make, device), trained(make, CPU), strict=True)
        assert all(torch.equal(got, expected) for got, expected in pairs), make.__name__


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_how_the_groups_send() -> None:
    """A group whose backend takes tensors of the device sends in streams, and Gloo through the host."""
    device = torch.device(hostdev.TYPE, 0)
    assert type(collectives_of(None, device)) is InStream
    assert type(collectives_of(gloo(), device)) is ThroughHost


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_ddp_as_every_frontend() -> None:
    results.every_form(DDP(), "allgather")
    results.every_codec(DDP(), "two_shot")
    results.parameters_that_are_not_used(DDP(), "two_shot")
    residuals.nonfinite_gradients(DDP(), "allgather")


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_all_reduce_as_every_frontend() -> None:
    # It may have had no tensor of the device.
    test_all_reduce_errors.test_a_first_call_that_is_wrong.body()
    results.every_form(Distributed(), "two_shot")
    results.every_codec(Distributed(), "allgather")
    residuals.nonfinite_gradients(Distributed(), "two_shot")
