"""The ranks of a process group, among which a compressor sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.ranks import Ranks
from hvd_compress.exchanges import hosts
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.driver import Driver
from hvd_compress.process_group.environment import Place, find_place, ranks_of_job
from hvd_compress.process_group.private import is_unregistered, timeout_of
from hvd_compress.process_group.rendezvous import Rendezvous
from hvd_compress.process_group.step import Step
from hvd_compress.ranks.errors import ExchangeError


class GroupRanks(Ranks):
    """The ranks of a process group, with what sends messages among them.

    Args:
        process_group: the ranks; None is the default group.

    Attributes:
        process_group: the argument of that name.
        joined: whether the compressor is ready to send among them.
        device: the device on which tensors are encoded.
        collectives: the collectives for this device.
        step: the step in progress, or None.
        origin: in a copy, the rank whose residuals it has, and the number of ranks there; otherwise None.
    """

    of_job = staticmethod(ranks_of_job)
    device: torch.device
    collectives: Collectives
    _place: Place | None

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.joined = False
        self.step: Step | None = None
        self.origin: tuple[int, int] | None = None
        # None while the ranks have to compare their configurations before a step.
        self._rendezvous: Rendezvous | None = None
        self._driver: Driver | None = None

    def expect_default(self, call: str) -> None:
        """Raises ``TypeError`` unless the ranks are those of the default process group."""
        if self.process_group not in (None, dist.group.WORLD):
            raise TypeError(
                f"{call}: expected a compressor of the default process group, got one of another group, "
                f"which has no name outside of this process: keep what state_dict() returns, and make a "
                f"compressor for the other model"
            )

    def connect(self, device: torch.device) -> None:
        """Makes the collectives for tensors on a device."""
        self.device = device
        self.collectives = collectives_of(self.process_group, device)

    def join(self, *, hierarchical: bool) -> None:
        """Takes this rank's place in the group.

        Args:
            hierarchical: whether gradients may be exchanged first within and then between hosts; then every
                rank of the job calls this method.
        """
        group = self.process_group
        ranks = Collectives(group)
        whole = not is_unregistered(group) and dist.get_world_size(group) == dist.get_world_size()
        self._place = find_place() if hierarchical and whole else None
        local = 1 if self._place is None else self._place.local
        self.group = Group(ranks.rank, ranks.size, Hosts(ranks.size, local))
        self._driver = None

    def expect_origin(self, slots: Iterable[Slot]) -> None:
        """Raises ``ExchangeError`` if a copy has another rank's residuals."""
        here, before = (self.group.rank, self.group.size), self.origin
        if before is not None and before != here and any(slot.exchanges for slot in slots):
            raise ExchangeError(
                f"expected a compressor that was copied or saved on rank {here[0]} of {here[1]}, got one "
                f"of rank {before[0]} of {before[1]}: each rank has residuals of its own; make a "
                f"compressor, and load_resized() the states of all ranks"
            )

    @property
    def driver(self) -> Driver:
        """The driver of the exchanges, made at its first use."""
        if self._driver is None:
            self._driver = Driver(self.collectives, self.group)
        return self._driver

    @property
    def busy(self) -> bool:
        """Whether a step is in progress."""
        return self.step is not None

    @property
    def agreed(self) -> bool:
        """Whether the ranks are known to have the same configuration."""
        return self._rendezvous is not None

    def prepare(self, slots: Iterable[Slot]) -> None:
        """Prepares the driver for the routes of slots; every rank calls it, and waits for the others."""
        self.driver.prepare(exchanges_of(slots))

    def begin_step(self) -> None:
        """Called before a step's first gradient."""
        self.collectives.begin_step()
        if self._rendezvous is not None:
            self._rendezvous.step += 1

    def agree(self, configuration: dict[str, Any], slots: Iterable[Slot]) -> None:
        """Compares the ranks' configurations, and prepares for the routes of slots; waits for the others.

        Raises:
            ExchangeError: the configurations differ (raised on every rank).
        """
        asked = Agreement(self.collectives, configuration)
        asked.settle()
        self.prepare(slots)
        self.note_agreement(asked.name)

    def note_agreement(self, name: str) -> None:
        """Called when all ranks have agreed, with the agreement's name.

        Ranks of a group that torch.distributed does not know have no common store to meet in. They compare
        their configurations before every step.
        """
        self.resets = 0
        if not is_unregistered(self.process_group):
            self._rendezvous = Rendezvous(name, *self.place_among_all)

    @property
    def place_among_all(self) -> tuple[int, int]:
        """This rank's number, and the number of ranks, among all ranks that change settings together."""
        return self.group.rank, self.group.size

    def forget_agreement(self) -> None:
        """Makes the ranks compare their configurations before the next step."""
        self._rendezvous = None

    def wait(self, call: str, **arguments: str) -> None:
        """Meets the other ranks in the job's store, at most for the group's timeout.

        Does nothing before the ranks have agreed for the first time, or when they no longer agree.
        """
        if self._rendezvous is not None:
            group: Any = self.process_group or dist.group.WORLD
            limit = timeout_of(group, self.device).total_seconds()
            self._rendezvous.wait(call, arguments, limit)
            self.forget_agreement()

    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` for a tensor on another device, or for hosts that are not known."""
        device = slot.parameter.device
        if device != self.device:
            where = "the CPU" if self.device.type == "cpu" else f"{self.device}, as another's"
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of {where}, got one on {device}: exclude "
                f"it by name to send it uncompressed"
            )
        if route.exchange == "hierarchical":
            if is_unregistered(self.process_group):
                raise ValueError(
                    f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group "
                    f"that torch.distributed did not make: hosts are those of the whole job"
                )
            if self.group.size != dist.get_world_size():
                raise ValueError(
                    f"{slot.name}: expected process_group=None for exchange='hierarchical', got a group "
                    f"of {self.group.size} of {dist.get_world_size()} ranks: hosts are those of the whole "
                    f"job"
                )
            if self._place is None:  # All ranks have to look for hosts together.
                raise ValueError(
                    f"{slot.name}: expected a compressor that was made with exchange='hierarchical', or "
                    f"with a route of this exchange in layers=, got one that does not know which ranks "
                    f"share a host: make it anew, and load what state_dict() of this one returns"
                )

    def usable(self, routes: Sequence[Route]) -> tuple[Sequence[Route], int]:
        """All routes, or those that need no hosts, and the number of ranks on each host."""
        assert self.group.hosts is not None
        local = self.group.hosts.local
        flat = not 1 < local < self.group.size
        return [r for r in routes if not (flat and r.exchange == "hierarchical")], local

    def result_of(self, collective: Collective, name: str) -> torch.Tensor:
        """Waits for a collective, which has no name in torch.distributed."""
        result, work = self.collectives.start(collective)
        work.wait()
        return result

    def configuration(self, *, hierarchical: bool) -> dict[str, Any]:
        if not hierarchical:
            return {}
        assert self._place is not None
        place = hosts.describe(self.group.rank, self.group.size, *astuple(self._place))
        return {"hosts": place}


def exchanges_of(slots: Iterable[Slot]) -> set[tuple[str, bool]]:
    """The exchanges of some slots' routes by name, and whether their messages are packed."""
    return {(s.route.exchange, s.route.codec.varies) for s in slots if not s.route.uncompressed}
