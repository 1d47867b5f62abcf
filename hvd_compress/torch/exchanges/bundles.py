"""Shots that travel together: Horovod fuses gathers of many tensors into one, but no alltoalls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.exchange import bundling
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Relay


class Member(Protocol):
    """One gradient in two shots: :class:`hvd_compress.torch.exchanges.two_shot.Shots`.

    Attributes:
        index: the parameter's number.
        message: the payloads for all owners, one after the other, shape=(bytes,), uint8.
        sizes: of these, one a rank.
        error: what went wrong.
    """

    index: int
    message: torch.Tensor
    sizes: list[int]
    error: Exception | None

    def average(self, payloads: torch.Tensor) -> torch.Tensor:
        """All ranks' payloads for this rank to the average's payload; zeros after an error."""
        ...

    def take(self, averages: list[torch.Tensor]) -> None:
        """The averages' payloads, one a rank."""
        ...


class Bundle(Relay):
    """An alltoall of all members' shards, and an allgather of all members' averages.

    The owner's work between the two is done by whoever calls :meth:`advance`.

    Args:
        collectives: the ranks.
        name: of the collectives, the same on every rank.
        members: in the same order on every rank.
    """

    def __init__(self, collectives: Collectives, name: str, members: Sequence[Member]) -> None:
        super().__init__(collectives)
        self._name = name
        self._members = members
        self._averaged = False

    def start(self) -> None:
        """Starts the first shot."""
        parts = [member.message.split(member.sizes) for member in self._members]
        message = torch.cat([part for owners in zip(*parts, strict=True) for part in owners])
        self.handle = self._collectives.distribute(
            message, self._sizes(), f"{self._name} to owners"
        )

    def fail(self, error: Exception) -> None:
        """See :meth:`Relay.fail`; it is every member's error."""
        super().fail(error)
        for member in self._members:
            member.error = member.error or error

    def _arrived(self, result: torch.Tensor) -> None:
        if self._averaged:
            self._take(result)
        else:
            self._averaged = True
            self._average(result)

    def _average(self, received: torch.Tensor) -> None:
        ranks, rank = self._collectives.size, self._collectives.rank
        own = [member.sizes[rank] for member in self._members]
        try:
            self._check(received, ranks * sum(own))
        except PayloadError as error:
            for member in self._members:
                member.error = error
            # Nobody shall wait for them.
            averages = [received.new_zeros(sum(own))]
        else:
            rows = received.view(ranks, sum(own)).split(own, dim=1)
            averages = [m.average(row) for m, row in zip(self._members, rows, strict=True)]
        self.handle = self._collectives.gather(torch.cat(averages), f"{self._name} from owners")

    def _take(self, gathered: torch.Tensor) -> None:
        self._check(gathered, sum(self._sizes()))
        by_owner = [
            block.split([member.sizes[owner] for member in self._members])
            for owner, block in enumerate(gathered.split(self._sizes()))
        ]
        for member, averages in zip(self._members, zip(*by_owner, strict=True), strict=True):
            member.take(list(averages))

    def _sizes(self) -> list[int]:
        return [sum(own) for own in zip(*(m.sizes for m in self._members), strict=True)]

    def _check(self, message: torch.Tensor, expected: int) -> None:
        if message.numel() != expected:
            raise PayloadError(f"{self._name}: expected {expected} bytes, got {message.numel()}")


class Bundles:
    """The bundles of a step, each sent as soon as its last member is there.

    Args:
        collectives: the ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._bundle_of: dict[int, int] = {}
        self._wanted: list[int] = []
        self._waiting: dict[int, list[Member]] = {}

    def plan(self, tensors: Sequence[tuple[int, int]]) -> None:
        """Makes up bundles of the tensors, (number, elements) each, anew."""
        made = bundling.bundles(tensors)
        self._wanted = [len(numbers) for numbers in made]
        self._bundle_of = {n: bundle for bundle, numbers in enumerate(made) for n in numbers}

    def add(self, member: Member) -> Relay | None:
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
