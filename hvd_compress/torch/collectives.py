"""Horovod's collectives, by name, within one process set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics, global_process_set

from hvd_compress.exchange import pairs
from hvd_compress.exchange.errors import ExchangeError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
_MEETING = 10.0
"""Seconds that a rank with an error waits for the others."""


@dataclass(frozen=True, eq=False)
class Handle:
    """A collective under way.

    Attributes:
        number: Horovod's.
        own: where it is a sum in a gather's place, this rank's message, shape=(n,), int32.
        rank: this rank, of two, in such a sum.
    """

    number: int
    own: torch.Tensor | None = None
    rank: int = 0

    def result(self) -> torch.Tensor:
        """What Horovod has for it, once it is over."""
        result = hvd.synchronize(self.number)
        if isinstance(result, tuple):
            result = result[0]
        if self.own is None:
            return result
        rows = torch.empty((2, len(self.own)), dtype=self.own.dtype)
        rows[self.rank] = self.own
        torch.sub(result, self.own, out=rows[1 - self.rank])
        return rows.view(-1).view(torch.uint8)


def equal_hosts() -> bool:
    """Whether every host has as many ranks as the others; the same answer on all of them."""
    return bool(_basics.is_homogeneous())


class Collectives:
    """Asynchronous named collectives among the ranks of a process set.

    Args:
        process_set: as the optimizer's; None is all ranks.
        prefix: what all names begin with.

    Raises:
        ExchangeError: Horovod is not initialized, or the process set is not registered.
    """

    def __init__(self, process_set: hvd.ProcessSet | None, prefix: str) -> None:
        if not hvd.is_initialized():
            raise ExchangeError("expected hvd.init() before a compressor is made, got no Horovod")
        self._process_set = global_process_set if process_set is None else process_set
        self._prefix = prefix
        if self._process_set.process_set_id is None:
            raise ExchangeError(
                "expected a registered process set, got one unknown to Horovod: pass it to hvd.init() or "
                "hvd.add_process_set() first"
            )
        self.rank: int = self._process_set.rank() if self._process_set.included() else -1
        self.size: int = self._process_set.size()

    @property
    def everywhere(self) -> bool:
        """Whether these are all of the job's ranks."""
        return self.size == hvd.size()

    def among(self, ranks: Sequence[int]) -> Collectives:
        """The same among some of the job's ranks, this one included.

        Blocks until all of the job's ranks have come here, unless Horovod knows the process set already.

        Raises:
            ExchangeError: Horovod does not take process sets now.
        """
        ids = {
            tuple(known): number
            for number, known in _basics._get_process_set_ids_and_ranks().items()
        }
        chosen = hvd.ProcessSet(ranks)
        if tuple(ranks) in ids:
            chosen.process_set_id = ids[tuple(ranks)]
        else:
            try:
                hvd.add_process_set(chosen)
            except ValueError as error:
                raise ExchangeError(
                    f"expected a Horovod that takes process sets, got: {error} Or pass "
                    f"hvd.ProcessSet({ranks}) to hvd.init()."
                ) from None
        return Collectives(chosen, self._prefix)

    def gather(self, message: torch.Tensor, name: str) -> Handle:
        """Starts a gather of a 1-dimensional uint8 tensor, lengths differing where they may."""
        return Handle(hvd.allgather_async(message, f"{self._prefix}.{name}", self._process_set))

    def gather_alike(self, message: torch.Tensor, name: str) -> Handle:
        """Starts a gather of messages, shape=(bytes,), uint8, that all ranks know to be equally long.

        On processors it may be a sum: see :mod:`hvd_compress.exchange.pairs`.
        """
        if message.device.type != "cpu" or not pairs.as_sum(self.size, message.numel()):
            return self.gather(message, name)
        own = message.view(torch.int32)
        return Handle(self.sum(own, name).number, own, self.rank)

    def distribute(self, message: torch.Tensor, sizes: Sequence[int], name: str) -> Handle:
        """Starts an exchange of parts: each rank gets its part of every rank's message, in rank order.

        Args:
            message: shape=(bytes,), uint8, the ranks' parts one after the other.
            sizes: of the parts, in bytes, 0 where there is none.
            name: the same on every rank.
        """
        splits = torch.tensor(sizes, dtype=torch.int32)
        return Handle(
            hvd.alltoall_async(message, splits, f"{self._prefix}.{name}", self._process_set)
        )

    def sum(self, values: torch.Tensor, name: str) -> Handle:
        """Starts a sum over the ranks; a rank that has joined adds zeros."""
        return self._reduce(values, name, hvd.Sum)

    def maximum(self, values: torch.Tensor, name: str) -> Handle:
        """Starts an element-wise maximum over the ranks; a NaN may be lost in it."""
        return self._reduce(values, name, hvd.Max)

    def _reduce(self, values: torch.Tensor, name: str, op: object) -> Handle:
        return Handle(
            hvd.allreduce_async(
                values, name=f"{self._prefix}.{name}", op=op, process_set=self._process_set
            )
        )

    @staticmethod
    def done(handle: Handle, within: float = 0.0) -> bool:
        """Whether :meth:`wait` would return at once, now or ``within`` seconds."""
        deadline = time.monotonic() + within
        pause = _SHORTEST_PAUSE
        while not hvd.poll(handle.number):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    @classmethod
    def wait(cls, handle: Handle) -> torch.Tensor:
        """A collective's result: of a gather or of parts, all ranks' one after the other in rank order.

        Sleeps until it is there. Horovod's own wait spins, on a core that its background thread and
        the network need: on as many cores as ranks, that takes longer than the transfer.
        """
        cls.done(handle, within=math.inf)
        return handle.result()

    def meet(self) -> None:
        """Returns when every rank has come here, or one of them has gone.

        The first rank to leave with an error tears down the others' connections, and they would report
        only that; an error that all ranks find is raised after a meeting.
        """
        with contextlib.suppress(HorovodInternalError):
            handle = self.gather(torch.zeros(1, dtype=torch.uint8), "meeting")
            if self.done(handle, within=_MEETING):
                self.wait(handle)
