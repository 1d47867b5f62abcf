"""Gradients in two shots that travel together: their parts for each owner side by side in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.codecs import PayloadError
from hvd_compress.torch_common.shots import Shots


class Shipment:
    """The messages of several gradients' shots.

    Args:
        name: for errors.
        members: in the same order on every rank.
        rank: this rank.
        size: ranks.

    Attributes:
        members: the gradients.
        sizes: bytes of each owner's part of the first shot, and of what it sends in the second one.
    """

    def __init__(self, name: str, members: Sequence[Shots], rank: int, size: int) -> None:
        self.members = members
        self._name = name
        self._rank, self._size = rank, size
        self.sizes = [sum(member.sizes[owner] for member in members) for owner in range(size)]

    @property
    def alike(self) -> bool:
        """Whether all owners' parts are equally long."""
        return len(set(self.sizes)) == 1

    def to_owners(self) -> torch.Tensor:
        """The first shot: the owners' parts one after the other, shape=(bytes,), uint8."""
        parts = [member.message.split(member.sizes) for member in self.members]
        return torch.cat([part for owners in zip(*parts, strict=True) for part in owners])

    def average(self, received: torch.Tensor) -> torch.Tensor:
        """This rank's work as an owner, between the shots.

        Never raises where another rank would wait for it: the members keep their errors.

        Args:
            received: all ranks' parts for this rank, in rank order, shape=(bytes,), uint8.

        Returns:
            The second shot: the averages, shape=(bytes,), uint8.
        """
        own = [member.sizes[self._rank] for member in self.members]
        try:
            self._check(received, self._size * sum(own))
        except PayloadError as error:
            self.fail(error)
            return received.new_zeros(sum(own))
        rows = received.view(self._size, sum(own)).split(own, dim=1)
        return torch.cat([m.average(row) for m, row in zip(self.members, rows, strict=True)])

    def take(self, gathered: torch.Tensor) -> None:
        """Hands out all owners' averages, one after the other in rank order, shape=(bytes,), uint8.

        Raises:
            PayloadError: of another size.
        """
        self._check(gathered, sum(self.sizes))
        by_owner = [
            block.split([member.sizes[owner] for member in self.members])
            for owner, block in enumerate(gathered.split(self.sizes))
        ]
        for member, averages in zip(self.members, zip(*by_owner, strict=True), strict=True):
            member.take(list(averages))

    def fail(self, error: Exception) -> None:
        """Makes an error every member's that has none."""
        for member in self.members:
            member.error = member.error or error

    def _check(self, message: torch.Tensor, expected: int) -> None:
        if message.numel() != expected:
            raise PayloadError(f"{self._name}: expected {expected} bytes, got {message.numel()}")
