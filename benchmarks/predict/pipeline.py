"""The wire: collectives one after another, as they become ready, and the computation between them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hvd_compress.exchanges.steps import Computation
from hvd_compress.planner.collectives import Collective, Stage
from hvd_compress.planner.cost import Cost, collective_seconds, computation_cost, sum_of
from hvd_compress.planner.machines import Cluster, CodecSpeed

S = TypeVar("S", Computation, Collective)

FUSION_BYTES = 64 * 2**20
"""The most bytes that Horovod fuses into one message, unless ``HOROVOD_FUSION_THRESHOLD`` changes this."""


@dataclass
class Transfer:
    """The exchange of one tensor, or of several that are sent together from the start.

    Attributes:
        ready: the time at which the next stage can begin, in seconds from the start of the training step.
        paths: the stages of each tensor, all of the same kinds.
        speeds: the speed of each tensor's codec.
    """

    ready: float
    paths: list[Sequence[Stage]]
    speeds: list[CodecSpeed]
    _position: int = 0

    @property
    def due(self) -> list[Stage]:
        """The next stage of each tensor; empty at the end."""
        return [path[self._position] for path in self.paths if self._position < len(path)]

    @property
    def works(self) -> bool:
        """Whether the next stage is a computation."""
        return bool(self.due) and isinstance(self.due[0], Computation)

    @property
    def travels(self) -> bool:
        """Whether any collective is left."""
        return any(isinstance(stage, Collective) for stage in self.paths[0][self._position :])

    def compute(self) -> Cost:
        """Does the computation that is next, and returns its cost."""
        return sum_of(computation_cost(stage, speed) for stage, speed in self.take(Computation))

    def take(self, kind: type[S]) -> list[tuple[S, CodecSpeed]]:
        """Takes the next stage of each tensor, of the given kind, with the speed of its codec."""
        taken = []
        for stage, speed in zip(self.due, self.speeds, strict=True):
            assert isinstance(stage, kind)
            taken.append((stage, speed))
        self._position += 1
        return taken


def carry(
    transfers: Sequence[Transfer], cluster: Cluster, costs: list[Cost]
) -> list[tuple[float, Transfer]]:
    """Does all collectives, and the computation between them, and adds their costs to ``costs``.

    Returns:
        The time at which each transfer's last collective ends, and the transfer, in the order of the times.
        Computation after the last collective is not done.
    """
    queue: list[_Waiting] = []
    arrived: list[tuple[float, Transfer]] = []

    def go_on(ready: float, order: int, transfer: Transfer) -> None:
        if transfer.works and transfer.travels:
            costs.append(transfer.compute())
            ready += costs[-1].total
        if transfer.travels:
            heapq.heappush(queue, (ready, order, transfer))
        else:
            arrived.append((ready, transfer))

    for order, transfer in enumerate(transfers):
        go_on(transfer.ready, order, transfer)
    free = 0.0
    while queue:
        ready, order, transfer = heapq.heappop(queue)
        start = max(free, ready)
        message = [(order, transfer), *_fused(queue, start, transfer)]
        collectives = [pair for _, one in message for pair in one.take(Collective)]
        sent = sum(collective.sent for collective, _ in collectives)
        costs.append(Cost(wire=collective_seconds(collectives, cluster), sent=sent))
        free = start + costs[-1].total
        for number, one in message:
            go_on(free, number, one)
    return arrived


_Waiting = tuple[float, int, Transfer]
"""The time at which a transfer's collective can begin; the transfer's number; the transfer."""


def _fused(queue: list[_Waiting], start: float, first: Transfer) -> list[tuple[int, Transfer]]:
    """Takes from the queue the transfers that Horovod would send in the same message as the first one."""
    kind, size = _fusible(first)
    if size is None:
        return []
    left = FUSION_BYTES - size
    taken: list[tuple[int, Transfer]] = []
    kept = []
    for entry in sorted(queue):
        ready, order, transfer = entry
        other, size = _fusible(transfer)
        if size is not None and other == kind and ready <= start and size <= left:
            left -= size
            taken.append((order, transfer))
        else:
            kept.append(entry)
    queue[:] = kept
    heapq.heapify(queue)
    return taken


def _fusible(transfer: Transfer) -> tuple[tuple[str, int], float | None]:
    """The properties that fused collectives must have in common, and the bytes of the next collectives."""
    due = [stage for stage in transfer.due if isinstance(stage, Collective)]
    kind = due[0].kind, due[0].latencies
    sizes = [one.fusible for one in due if one.fusible is not None]
    return kind, sum(sizes) if sizes else None
