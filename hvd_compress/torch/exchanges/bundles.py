"""Shots that travel together: Horovod fuses gathers of many tensors into one, but no alltoalls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.exchange import bundling
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Relay
from hvd_compress.torch_common.shipment import Shipment
from hvd_compress.torch_common.shots import Shots


class Bundle(Relay):
    """An alltoall of all members' shards, and an allgather of all members' averages.

    The owner's work between the two is done by whoever calls :meth:`advance`.

    Args:
        collectives: the ranks.
        name: of the collectives, the same on every rank.
        members: in the same order on every rank.
    """

    def __init__(self, collectives: Collectives, name: str, members: Sequence[Shots]) -> None:
        super().__init__(collectives)
        self._name = name
        self._shipment = Shipment(name, members, collectives.rank, collectives.size)
        self._averaged = False

    def start(self) -> None:
        """Starts the first shot."""
        message, sizes = self._shipment.to_owners(), self._shipment.sizes
        self.handle = self._collectives.distribute(message, sizes, f"{self._name} to owners")

    def fail(self, error: Exception) -> None:
        """See :meth:`Relay.fail`; it is every member's error."""
        super().fail(error)
        self._shipment.fail(error)

    def _arrived(self, result: torch.Tensor) -> None:
        if self._averaged:
            self._shipment.take(result)
            return
        self._averaged = True
        averages = self._shipment.average(result)
        ranks = self._collectives
        gather = ranks.gather_alike if self._shipment.alike else ranks.gather
        self.handle = gather(averages, f"{self._name} from owners")


class Bundles:
    """The bundles of a step, each sent as soon as its last member is there.

    Args:
        collectives: the ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._bundle_of: dict[int, int] = {}
        self._wanted: list[int] = []
        self._waiting: dict[int, list[Shots]] = {}

    def plan(self, tensors: Sequence[tuple[int, int]]) -> None:
        """Makes up bundles of the tensors, (number, elements) each, anew."""
        made = bundling.bundles(tensors)
        self._wanted = [len(numbers) for numbers in made]
        self._bundle_of = {n: bundle for bundle, numbers in enumerate(made) for n in numbers}

    def add(self, member: Shots) -> Relay | None:
        """Puts a member into its bundle, and sends that off if it was the last one."""
        bundle = self._bundle_of[member.index]
        waiting = self._waiting.setdefault(bundle, [])
        waiting.append(member)
        return self._send(bundle) if len(waiting) == self._wanted[bundle] else None

    def flush(self) -> list[Relay]:
        """Sends bundles whose other members have no gradient in this step."""
        return [self._send(bundle) for bundle in sorted(self._waiting)]

    def _send(self, bundle: int) -> Relay:
        members = sorted(self._waiting.pop(bundle), key=lambda member: member.index)
        relay = Bundle(self._collectives, f"bundle {bundle}", members)
        relay.start()
        return relay
