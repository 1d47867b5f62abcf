"""The code that the rows of the frontends that send by torch.distributed share."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from hvd_compress.ranks.errors import ExchangeError
from tests.contract.pytorch import TorchFrontend


class ProcessGroupFrontend(TorchFrontend):
    """A frontend whose ranks are those of a process group, started by torchrun."""

    launcher, launcher_of_hosts = "torchrun", "two nodes"
    errors = ExchangeError
    outsiders = False

    rank = property(lambda self: dist.get_rank())
    size = property(lambda self: dist.get_world_size())
    local = property(lambda self: int(os.environ["LOCAL_WORLD_SIZE"]))

    def group_of(self, *ranks: int) -> dict[str, Any]:
        return {"process_group": dist.new_group(ranks)}

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        dist.barrier()
