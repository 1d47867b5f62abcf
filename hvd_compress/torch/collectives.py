"""Horovod's collectives on bytes, by name, within one process set."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import global_process_set

from hvd_compress.exchange.errors import ExchangeError


class Collectives:
    """Asynchronous named gathers among the ranks of a process set.

    Args:
        process_set: as the optimizer's; None is all ranks.

    Raises:
        ExchangeError: Horovod is not initialized, or the process set is not registered.
    """

    def __init__(self, process_set: hvd.ProcessSet | None) -> None:
        if not hvd.is_initialized():
            raise ExchangeError("expected hvd.init() before a compressor is made, got no Horovod")
        self._process_set = global_process_set if process_set is None else process_set
        if self._process_set.process_set_id is None:
            raise ExchangeError(
                "expected a registered process set, got one unknown to Horovod: pass it to hvd.init() or "
                "hvd.add_process_set() first"
            )
        included = self._process_set.included()
        self.rank: int = self._process_set.rank() if included else -1
        self.size: int = self._process_set.size()

    def gather(self, message: torch.Tensor, name: str) -> int:
        """Starts a gather of a 1-dimensional uint8 tensor; the handle is for :meth:`wait`."""
        return hvd.allgather_async(message, name=name, process_set=self._process_set)

    @staticmethod
    def wait(handle: int) -> torch.Tensor:
        """All ranks' messages of one gather, one after the other in rank order."""
        return hvd.synchronize(handle)
