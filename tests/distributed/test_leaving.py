"""A process may end right after its last step, while its process groups' threads are still at work."""

import sys

import pytest

from tests import jobs

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
model.register_comm_hook(hvdc.OneBit(model, exchange=sys.argv[1]), hvdc.hook)
print("started", flush=True)
for _ in range(3):
    model(torch.randn(8, 64)).sum().backward()
"""


@pytest.mark.parametrize("exchange", ["allgather", "two_shot"])
def test_the_process_ends_well_right_after_its_last_step(exchange: str) -> None:
    command = [sys.executable, "-c", SCRIPT, exchange]
    for _ in range(2):  # Without care for it, one start in five ends badly.
        printed = jobs.run("torchrun", 2, command, {"PYTHONPATH": str(jobs.ROOT)})
        assert printed.count("started") == 2, printed
        assert "terminate" not in printed, printed
        assert "FAILED" not in printed, printed
