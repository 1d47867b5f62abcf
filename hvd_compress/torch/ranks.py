"""The ranks of Horovod, among which a compressor sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.ranks import Ranks
from hvd_compress.exchanges import hosts
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.launch import warn_of_separate_jobs
from hvd_compress.torch.collectives import HorovodCollectives, equal_hosts
from hvd_compress.torch.step import HorovodStep

_TIMEOUT = 60.0
"""Seconds to wait for ranks that have ended the same step."""


class HorovodRanks(Ranks):
    """The ranks of a process set.

    Args:
        process_set: Horovod's process set; None is all ranks.
        prefix: the prefix of the names of collectives.
        slots: the parameters whose gradients are exchanged.

    Attributes:
        process_set: the argument of that name.
        collectives: the collectives among the ranks.
        step: sends the gradients of each step; set after :meth:`join`.
        exchanging: whether a step has begun whose first gradient has not been reduced.
    """

    idle_after = "optimizer.synchronize() or optimizer.step(), which wait for all gradients"
    collectives: HorovodCollectives
    step: HorovodStep

    def __init__(self, process_set: Any | None, prefix: str, slots: Iterable[Slot]) -> None:
        self.process_set = process_set
        self._prefix = prefix
        self._slots = slots
        self.exchanging = False

    def join(self) -> None:
        """Takes this rank's place, as Horovod knows it now."""
        self.collectives = HorovodCollectives(self.process_set, self._prefix)
        warn_of_separate_jobs(hvd.size())
        self.group = _group_of(self.collectives)
        self.exchanging = False

    def expect_same(self) -> None:
        """Raises ``ExchangeError`` if Horovod has been initialized since :meth:`join`."""
        found = _group_of(self.collectives)
        if found != self.group:
            raise ExchangeError(
                f"expected {_describe(self.group)}, as when this compressor took its place, got "
                f"{_describe(found)}: Horovod has been initialized again; for elastic training use "
                f"hvd_compress.torch.elastic.TorchState, which keeps what the compressor has, or at least "
                f"call compressor.rebind() after each hvd.init()"
            )

    @staticmethod
    def of_job() -> int:
        return hvd.size() if hvd.is_initialized() else 1

    @property
    def busy(self) -> bool:
        return self.exchanging or self.step.busy or any(slot.pending for slot in self._slots)

    def forget_agreement(self) -> None:
        self.step.plan(
            s for s in self._slots if s.parameter.requires_grad and not s.route.uncompressed
        )

    def wait(self, call: str, **arguments: str) -> None:
        """Does nothing: the next step compares what the ranks have called."""

    def check(self, slot: Slot, route: Route) -> None:
        ranks = self.collectives
        if route.exchange == "hierarchical" and not ranks.everywhere:
            raise ValueError(
                f"{slot.name}: expected process_set=None for exchange='hierarchical', got a set of "
                f"{ranks.size} of {hvd.size()} ranks: hosts are those of the whole job"
            )

    def usable(self, routes: Sequence[Route]) -> tuple[Sequence[Route], int]:
        # A process set's ranks may be anywhere, so each counts as a host of its own.
        local = hvd.local_size() if self.collectives.everywhere and equal_hosts() else 1
        hierarchical = hosts.usable(hvd.size(), hvd.local_size(), equal_hosts())
        without = () if hierarchical else ("hierarchical",)
        return [r for r in routes if r.uncompressed or r.exchange not in without], local

    def result_of(self, collective: Collective, name: str) -> torch.Tensor:
        handle = self.collectives.start(collective, name)
        if not handle.done(_TIMEOUT):
            raise ExchangeError(
                f"expected all {self.group.size} ranks to measure after the same step, got some that never "
                f"do: ranks have made different numbers of steps, or one has ended"
            )
        return handle.wait()

    def configuration(self, *, hierarchical: bool) -> dict[str, Any]:
        # Horovod waits for ever for a rank without hooks for a gradient.
        trained = {"requires_grad of": {slot.name: not slot.frozen for slot in self._slots}}
        ranks = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())
        return {**trained, "hosts": hosts.describe(*ranks)} if hierarchical else trained


def _group_of(ranks: HorovodCollectives) -> Group:
    """This rank's place, as Horovod knows it now."""
    return Group(*ranks.place, Hosts(hvd.size(), hvd.local_size()))


def _describe(group: Group) -> str:
    assert group.hosts is not None
    return f"rank {group.rank} of {group.size} with {group.hosts.local} on this host"
