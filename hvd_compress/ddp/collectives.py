"""torch.distributed's collectives within one process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hvd_compress.exchange.errors import ExchangeError

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in PyTorch 2.13."""


class Collectives:
    """Asynchronous collectives among the ranks of a process group.

    They have no names: all ranks have to start them in the same order.

    Args:
        group: as DDP's; None is the default group.

    Raises:
        ExchangeError: torch.distributed is not initialized, or this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ExchangeError(
                "expected torch.distributed.init_process_group() before a compressor is made, got no "
                "process group"
            )
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ExchangeError("expected a process group with this rank in it, got one without")

    def gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Starts a gather of a tensor, shape=(n,), the same n on every rank.

        Returns:
            Where the ranks' messages will be, shape=(ranks, n), and what to wait for.
        """
        rows = message.new_empty((self.size, message.numel()))
        return rows, _gather(rows.view(-1), message, group=self._group, async_op=True)

    def average(self, values: torch.Tensor) -> dist.Work:
        """Starts an average over the ranks, in place.

        Divides first, as PyTorch's hooks do: in half precision a sum might overflow.
        """
        return dist.all_reduce(values.div_(self.size), group=self._group, async_op=True)
