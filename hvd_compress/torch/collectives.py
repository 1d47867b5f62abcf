"""Horovod's collectives, by name, within one process set."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics

from hvd_compress.codecs import PayloadError
from hvd_compress.exchanges import sum_as_gather
from hvd_compress.exchanges.comm import Collective
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.ranks import agreement, process_sets
from hvd_compress.ranks.errors import ExchangeError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
_PAUSE_SHARE = 1 / 16
"""The pause between two checks of a collective, as a share of the time waited so far: a check takes
processor time from the threads that it waits for."""

_BARRIER_TIMEOUT = 10.0
"""Seconds that a rank with an error waits for the others."""


@dataclass(frozen=True, eq=False)
class Handle:
    """A collective in progress.

    Attributes:
        number: Horovod's handle.
        name: the name of the collective, for messages.
        rows: the number of rows of the result; None leaves the result in Horovod's shape.
        length: bytes or elements of a row.
        own: this rank's message where a sum replaces an all_gather, shape=(n,), int32.
        rank: this rank, of two, in such a sum.
    """

    number: int
    name: str
    rows: int | None = None
    length: int = 0
    own: torch.Tensor | None = None
    rank: int = 0

    def done(self, within: float = 0.0) -> bool:
        """Whether :meth:`wait` would return at once, now or within ``within`` seconds."""
        started = time.monotonic()
        while not hvd.poll(self.number):
            waited = time.monotonic() - started
            if waited >= within:
                return False
            time.sleep(min(max(_SHORTEST_PAUSE, _PAUSE_SHARE * waited), _LONGEST_PAUSE))
        return True

    def wait(self) -> torch.Tensor:
        """The result; its rows, if :meth:`HorovodCollectives.start` made any, are in the order of ranks.

        Sleeps between checks until the result is there. Horovod's own wait spins, on a core that its
        background thread and the other ranks need.

        Raises:
            PayloadError: the messages of the ranks and this rank's differ in size.
            HorovodInternalError: Horovod has ended.
        """
        self.done(within=math.inf)
        result = hvd.synchronize(self.number)
        if isinstance(result, tuple):
            result = result[0]
        if self.own is not None:
            rows = torch.empty((2, len(self.own)), dtype=self.own.dtype, device="cpu")
            rows[self.rank] = self.own
            torch.sub(result, self.own, out=rows[1 - self.rank])
            return rows.view(torch.uint8)
        if self.rows is None:
            return result
        if result.numel() != self.rows * self.length:
            raise PayloadError(
                f"{self.name}: expected {self.rows} times {self.length} bytes, got {result.numel()}"
            )
        return result.view(self.rows, self.length)


def equal_hosts() -> bool:
    """Whether all hosts have the same number of ranks; the same answer on all of them."""
    return bool(_basics.is_homogeneous())


class HorovodCollectives:
    """Asynchronous named collectives among the ranks of a process set.

    Those of an exchange may be among the ranks of a host, or between hosts, after :meth:`register`.

    Args:
        process_set: the same as the optimizer's; None is all ranks.
        prefix: the prefix of all names.

    Raises:
        ExchangeError: Horovod is not initialized, or the process set is not registered.
    """

    def __init__(self, process_set: hvd.ProcessSet | None, prefix: str) -> None:
        self._process_set = process_sets.registered(hvd, process_set)
        self._prefix = prefix
        self.rank, self.size = self.place
        self._by_scope: dict[str, HorovodCollectives] = {}

    @property
    def place(self) -> tuple[int, int]:
        """This rank's current number among the ranks, or -1 if it is not one of them, and their number."""
        chosen = self._process_set
        return (chosen.rank() if chosen.included() else -1), chosen.size()

    @property
    def everywhere(self) -> bool:
        """Whether these are all of the job's ranks."""
        return self.size == hvd.size()

    def among(self, ranks: Sequence[int]) -> HorovodCollectives:
        """The same collectives among some of the job's ranks, including this one.

        See :func:`hvd_compress.ranks.process_sets.among`.
        """
        known = _basics._get_process_set_ids_and_ranks()
        return HorovodCollectives(process_sets.among(hvd, known, ranks), self._prefix)

    def register(self, hosts: Hosts) -> None:
        """Registers the process sets of hosts. Every rank has to call it; waits for all of them.

        Raises:
            ExchangeError: Horovod does not take process sets now.
        """
        for ranks in hosts.groups():
            if len(ranks) == 1 and Collective.skips_alone:
                continue  # Nothing to send.
            group = self.among(ranks)
            if ranks == hosts.within(self.rank):
                self._by_scope["local"] = group
            if ranks == hosts.between(self.rank):
                self._by_scope["cross"] = group

    def start(self, collective: Collective, name: str) -> Handle:
        """Starts a collective that an exchange asks for, among the ranks of its scope.

        An all_gather on processors may run as a sum: see :mod:`hvd_compress.exchanges.sum_as_gather`.
        """
        ranks = self if collective.scope == "all" else self._by_scope[collective.scope]
        return ranks._start(collective, name)

    def _start(self, collective: Collective, name: str) -> Handle:
        message = collective.message
        if collective.kind == "all_reduce":
            return self.all_reduce(message, name, collective.op)
        if collective.kind == "all_to_all":
            splits = torch.tensor(collective.sizes, dtype=torch.int32, device="cpu")
            full = f"{self._prefix}.{name}"
            number = self._enqueue(hvd.alltoall_async, message, splits, full)
            return Handle(number, name, self.size, collective.sizes[self.rank])
        if message.is_cpu and sum_as_gather.as_sum(self.size, message.numel()):
            own = message.view(torch.int32)
            return Handle(self.all_reduce(own, name).number, name, own=own, rank=self.rank)
        gather = self.all_gather(message, name)
        return Handle(gather.number, name, self.size, message.numel())

    def all_gather(self, message: torch.Tensor, name: str) -> Handle:
        """Starts an all_gather of a 1-dimensional uint8 tensor, whose lengths may differ."""
        full = f"{self._prefix}.{name}"
        return Handle(self._enqueue(hvd.allgather_async, message, full), name)

    def all_reduce(
        self, values: torch.Tensor, name: str, op: Literal["sum", "max"] = "sum"
    ) -> Handle:
        """Starts an all_reduce; a rank that has joined adds zeros. A maximum may lose a NaN."""
        full, operation = f"{self._prefix}.{name}", hvd.Sum if op == "sum" else hvd.Max
        return Handle(self._enqueue(hvd.allreduce_async, values, name=full, op=operation), name)

    def _enqueue(self, collective: Callable[..., int], *arguments: Any, **options: Any) -> int:
        try:
            return collective(*arguments, **options, process_set=self._process_set)
        except ValueError as error:
            if self._registered():
                raise
            # Horovod removes them when it has lost a rank. Elastic training goes on after this error.
            raise HorovodInternalError(f"a process set is gone: {error}") from error

    def _registered(self) -> bool:
        try:
            return self._process_set.process_set_id in _basics._get_process_set_ids_and_ranks()
        except ValueError:  # Horovod has ended meanwhile, because another rank has.
            return False

    def send_settings(self, settings: dict[str, Any], name: str) -> Handle:
        """Starts a comparison of the ranks' settings, JSON-serializable; :meth:`check_settings` ends it."""
        line = torch.frombuffer(bytearray(agreement.serialize(settings)), dtype=torch.uint8)
        return self.all_gather(line, name)

    def check_settings(self, handle: Handle) -> None:
        """Waits for the settings of all ranks.

        Raises:
            ExchangeError: settings differ (raised on every rank, with the difference).
        """
        gathered = handle.wait()
        try:
            agreement.check(gathered.numpy().tobytes())
        except ExchangeError:
            self.barrier()
            raise

    def barrier(self) -> None:
        """Returns when every rank has called it, or one of them has ended.

        The first rank to leave with an error closes the others' connections, and they would report only
        that; an error that all ranks find is raised after a barrier.
        """
        with contextlib.suppress(HorovodInternalError):
            handle = self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), "barrier")
            if handle.done(within=_BARRIER_TIMEOUT):
                handle.wait()
