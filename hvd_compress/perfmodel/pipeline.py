"""The wire: collectives one after another, as they become ready, and the computation between them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_compress.exchanges.steps import Computation
from hvd_compress.perfmodel.collectives import Collective, Stage
from hvd_compress.perfmodel.cost import collective_seconds
from hvd_compress.perfmodel.machines import Cluster, CodecSpeed

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

    def done(self) -> None:
        """Marks the next stage as done."""
        self._position += 1


@dataclass
class Totals:
    """The seconds and bytes of a step.

    Attributes:
        encode, wire, decode: the seconds in encoders, collectives and decoders.
        sent: the bytes that a rank sends, averaged over the ranks.
    """

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0
    sent: float = 0.0

    def compute(self, transfer: Transfer) -> float:
        """Does the computation that is next, and returns its seconds."""
        encode = decode = 0.0
        for stage, speed in zip(transfer.due, transfer.speeds, strict=True):
            assert isinstance(stage, Computation)
            encode += stage.encoded * speed.encode
            decode += stage.decoded * speed.decode + stage.added * speed.add
        transfer.done()
        self.encode += encode
        self.decode += decode
        return encode + decode

    def communicate(self, transfers: Sequence[Transfer], cluster: Cluster) -> float:
        """Does the collectives that are next as one message, and returns its seconds."""
        collectives = []
        for transfer in transfers:
            for stage, speed in zip(transfer.due, transfer.speeds, strict=True):
                assert isinstance(stage, Collective)
                collectives.append((stage, speed))
            transfer.done()
        seconds = collective_seconds(collectives, cluster)
        self.wire += seconds
        self.sent += sum(one.sent for one, _ in collectives)
        return seconds


def carry(
    transfers: Sequence[Transfer], cluster: Cluster, totals: Totals
) -> list[tuple[float, Transfer]]:
    """Does all collectives, and the computation between them.

    Returns:
        The time at which each transfer's last collective ends, and the transfer, in the order of the times.
        Computation after the last collective is not done.
    """
    queue: list[_Waiting] = []
    arrived: list[tuple[float, Transfer]] = []

    def go_on(ready: float, order: int, transfer: Transfer) -> None:
        if transfer.works and transfer.travels:
            ready += totals.compute(transfer)
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
        free = start + totals.communicate([one for _, one in message], cluster)
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
