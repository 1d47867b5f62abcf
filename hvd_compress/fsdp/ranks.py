"""The ranks of a mesh: the replicas of this rank's shards, and the ranks that share the parameters out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs.checks import check_choice
from hvd_compress.engine.executors import device_of
from hvd_compress.engine.parameters import Slot
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.meshes import FLAT
from hvd_compress.process_group.ranks import GroupRanks
from hvd_compress.ranks.errors import ExchangeError


class MeshRanks(GroupRanks):
    """The ranks of a mesh of replicas and shards.

    Args:
        process_group: the ranks with the same shards as this one.
        shards: the ranks of this replica, which share the parameters out.

    Attributes:
        shards: the argument of that name.
        shard: this rank's number among these ranks, and how many they are.
    """

    idle_after = (
        "a backward pass that has come to its end, or after model.reset_iter_state() if an error has "
        "broken it off"
    )

    def __init__(self, process_group: dist.ProcessGroup | None, shards: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.shards = shards
        self.shard = [dist.get_rank(shards), dist.get_world_size(shards)]

    @property
    def place_among_all(self) -> tuple[int, int]:
        """This rank's number in the mesh, and the number of ranks in it."""
        shard, shards = self.shard
        return self.group.rank * shards + shard, self.group.size * shards

    @property
    def first(self) -> bool:
        """Whether this is the first rank of the mesh."""
        return super().first and self.shard[0] == 0

    def slowest(self, table: torch.Tensor) -> torch.Tensor:
        """The largest of the sums of the replicas' ranks: each shard has replicas of its own."""
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self.shards)
        return table

    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` also for an exchange that shards cannot use."""
        check_choice(slot.name, "exchange", route.exchange, FLAT)
        super().check(slot, route)

    def agree_on_mesh(
        self,
        configuration: dict[str, Any],
        settings: dict[str, Any],
        slots: Sequence[Slot],
        problem: Exception | None = None,
    ) -> None:
        """Compares settings over the whole mesh, and prepares for the routes of slots.

        Args:
            configuration: the settings that replicas of the same shards have in common.
            settings: the settings that all ranks have in common.
            slots: the shards.
            problem: an error on this rank, with which all ranks raise one; or None.
        """
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        line = {"error": own} if own else {**configuration, "shard": self.shard}
        device = device_of(slot.parameter for slot in slots)
        difference, name = _difference(self.process_group, device, line)
        # The shapes of other shards may differ.
        line = {"error": str(difference or own), **settings}
        # The first replica's first rank has named the agreement of the whole mesh.
        other, name = _difference(self.shards, device, line, name)
        for error in (problem, difference, other):
            if error is not None:
                raise error
        self.prepare(slots)
        self.note_agreement(name)

    def outcome(
        self, dropped: bool | torch.Tensor, failed: bool, uneven: Sequence[torch.Tensor]
    ) -> tuple[bool, bool, bool]:
        """Whether each argument holds on one of this replica's ranks; the host waits for the device once.

        Args:
            dropped: whether the step is dropped; see :func:`~hvd_compress.engine.batch.judge`.
            failed: whether an exchange has failed.
            uneven: words that are not 0 if replicas have used different parameters of a shard.
        """
        words = torch.zeros(3, dtype=torch.int32, device=self.device)
        if isinstance(dropped, torch.Tensor):
            words[:1].copy_(dropped)
        else:
            words[0].fill_(dropped)
        words[1].fill_(failed)
        if uneven:
            words[2] = torch.stack(list(uneven)).any()
        dist.all_reduce(words, dist.ReduceOp.MAX, group=self.shards)
        drops, fails, differs = map(bool, words.tolist())
        return drops, fails, differs


def _difference(
    group: dist.ProcessGroup | None,
    device: torch.device,
    line: dict[str, Any],
    name: str | None = None,
) -> tuple[Exception | None, str]:
    """The error that names the ranks' differences, or None; and the name of the agreement."""
    asked = Agreement(collectives_of(group, device), line, name)
    difference = None
    try:
        asked.settle()
    except ExchangeError as error:
        difference = error
    return difference, asked.name
